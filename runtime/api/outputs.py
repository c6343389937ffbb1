"""Outputs: the results that `runtime` returns to `server`, and the streams from which they are read."""

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
    """Log-probability of a token before temperature, penalties and filters (natural logarithm).

    `rank` counts from 1, the most likely token. `top`: (id, log-probability) of the most likely tokens, or of the requested
    ids in their order."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Output:
    """Increment of one request of a `TokenStream` since the last read. Do not modify it. It is not frozen, because a frozen
    dataclass takes four times as long to create.

    `index`: position of the request in the `submit` call. `token_ids` include the token that ended it (EOS or stop token)
    unless `complete` is set: a matcher allowed no further token. `stop_token_id`: the id of `SamplingParams.stop_token_ids`
    that ended it. `num_cached_tokens`: prompt tokens from the prefix cache. `logprobs`: one for each of `token_ids`, None if
    not requested. `prompt_logprobs`: with the first Output, one for each prompt token but the first. `pooled`: contiguous
    float32 numbers (format "f") in the task's shape; `numpy.asarray` converts it without a copy. `retry_after_s`: for a
    request that waited too long to start. `num_draft_tokens`, `num_accepted_tokens`: draft tokens verified and accepted so
    far."""

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
    """Fast path that writes the text of new ids of one request directly to its client, if a step yields only ids.

    It closes if it cannot write at once. The stream then passes the ids to the reader, and opens the writer again."""

    is_open: bool

    @staticmethod
    def write_all(work: list[Any]) -> list[tuple[Any, Exception | None]]:
        """Write all of `work`: tuples of a writer of this class, a list of ids, and any further values. Return the tuples
        that were not written, each with its error or None."""
        ...


WriterOf = Callable[[int], TokenWriter | None]  # called with a request's index


class TokenStream(Protocol):
    """Outputs of the requests of one `submit`, in the order they settle.

    Use: `async with engine.submit([request]) as stream: async for outputs in stream: ...`. Every request ends with exactly
    one Output whose `finish` is set; the iteration ends after the last. A slow reader gets several tokens in one Output and
    delays no other reader. Leaving the block aborts unfinished requests."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Sequence[Output]:
        """Wait for at least one Output, at most one per index."""
        ...

    async def hand_to(self, take: Take, writer_of: WriterOf | None = None) -> None:
        """Call `take` with each item that an iteration would return, and return after the last one.

        An awaitable that `take` returns is awaited before the next call. `writer_of` is called after a request's first
        Output; ids that its writer accepts are not passed to `take`. Errors of `take` are raised here. The engine's own
        stream wakes no task per step; other streams iterate."""
        async for outputs in self:
            if (rest := take(outputs)) is not None:
                await rest()

    def stop(self, index: int) -> None:
        """End one request now as complete, because a stop string was found. Its blocks are freed at once; it yields no
        further Output."""
        ...
