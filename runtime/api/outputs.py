"""Outputs: the results that `runtime` returns to `server`, and the streams that yield them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Protocol, Self


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence id or a stop token id, or pooling is done
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client left, or the server is shutting down
    TIMEOUT = "timeout"  # deadline passed, or waited too long to start (then `Output.retry_after_s` is set)
    ERROR = "error"  # the engine failed; `Output.error` has the message
    INVALID = "invalid"  # the constraints cannot be satisfied; `Output.error` has the message for the client


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token (natural logarithm), before temperature, penalties and filters.

    `rank`: rank of the token by probability; 1 is the most likely. `top`: (token id, log-probability) of the most likely
    tokens, or of the requested token ids in their order."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Output:
    """New results of one request of a `TokenStream` since the last read. Do not modify it. It is not frozen, because a frozen
    dataclass takes four times as long to create.

    `index`: index of the request in the `submit` call. `token_ids`: new ids, including the EOS or stop token. `complete`: the
    request ended without a final token, because a matcher allowed no further token. `stop_token_id`: the id of
    `SamplingParams.stop_token_ids` that ended the request. `num_cached_tokens`: prompt tokens from the prefix cache.
    `logprobs`: one for each of `token_ids`; None if not requested. `prompt_logprobs`: only in the first Output; one for each
    prompt token but the first. `pooled`: contiguous float32 numbers in the task's shape; `numpy.asarray` converts it without a
    copy. `retry_after_s`: retry delay for a request that waited too long to start. `num_draft_tokens`, `num_accepted_tokens`:
    draft tokens verified and accepted so far."""

    index: int
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    complete: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: memoryview | None = None
    retry_after_s: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


Take = Callable[[Sequence[Output]], Callable[[], Awaitable[None]] | None]


class TokenWriter(Protocol):
    """Fast path of one request: writes the text of new token ids directly to its client, if a step yields nothing else.

    A writer that cannot write at once sets `is_open` to False. The stream passes the ids to the reader and sets it to True."""

    is_open: bool

    @staticmethod
    def write_all(work: list[Any]) -> list[tuple[Any, Exception | None]]:
        """Write all of `work`: tuples that begin with a writer of this class and a list of ids. Return a list of (tuple, error
        or None) for each tuple that was not written."""
        ...


WriterOf = Callable[[int], TokenWriter | None]  # called with a request's index


class TokenStream(Protocol):
    """Outputs of the requests of one `submit` call, in the order in which steps produce them.

    Use: `async with engine.submit([request]) as stream: async for outputs in stream: ...`. Every request ends with exactly one
    Output whose `finish` is set; the iteration ends after the last. A slow reader gets several tokens in one Output and delays
    no other reader. Leaving the block aborts unfinished requests."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Sequence[Output]:
        """Wait for new results. Return at least one Output, and at most one per request."""
        ...

    async def hand_to(self, take: Take, writer_of: WriterOf | None = None) -> None:
        """Call `take` with each list of Outputs that an iteration would return. Return after the last one.

        If `take` returns a function, its awaitable is awaited before the next call. `writer_of(index)` is called after a
        request's first Output and returns its writer or None. Token ids that the writer writes are not passed to `take`. Errors
        of `take` are raised here. Streams of the engine override this method, so that no task is woken per step."""
        async for outputs in self:
            if (rest := take(outputs)) is not None:
                await rest()

    def stop(self, index: int) -> None:
        """End request `index` now as complete, because the reader found a stop string. Its blocks are freed at once, and it
        yields no further Output."""
        ...
