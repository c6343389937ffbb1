"""TokenStream: buffer between the engine, which adds new tokens, and a request handler, which reads them.

There is one stream per `submit` call, for one or several requests. Tokens are not queued singly: a slow reader gets all tokens
since its last read as one Output per request, so memory is bounded by max_tokens. Leaving the `async with` block aborts unfinished
requests; no other clean-up is needed.

A reader either iterates, which wakes its task in each step, or passes a function to `hand_to`, which costs one call.
`StreamNotifier` calls these functions after the engine's own callback, so the next step is launched first. Most steps yield
only token ids. These go directly to the reader's `TokenWriter`, if it has one, in one call for many streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from runtime.api import FinishReason, Output, Take, TokenLogprobs, TokenWriter, WriterOf

STREAMS_A_TURN = 64  # streams per turn, about half a millisecond; other callbacks run between turns
WRITERS_A_TURN = 256  # writers per turn, likewise


# Arguments of `TokenWriter.write_all` (writer and ids), and the stream and request index for ids that were not written.
_ToWrite = tuple[TokenWriter, list[int], "EngineTokenStream", int]


class StreamNotifier:
    """Queue of streams with new Outputs, and of token ids for writers, in order of arrival. Ids are written first. A stream
    with queued Outputs has no queued ids."""

    def __init__(self) -> None:
        self._streams: list[EngineTokenStream] = []
        self._to_write: list[_ToWrite] = []
        self._is_due = False

    def add(self, stream: EngineTokenStream) -> None:
        self._streams.append(stream)
        self._come()

    def write(self, writer: TokenWriter, token_ids: list[int], stream: EngineTokenStream, index: int) -> None:
        self._to_write.append((writer, token_ids, stream, index))
        if not self._is_due:
            self._come()

    def _come(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        if self._to_write:
            work, self._to_write = self._to_write[:WRITERS_A_TURN], self._to_write[WRITERS_A_TURN:]
            for (_, token_ids, stream, index), error in work[0][0].write_all(work):
                stream.not_written(index, token_ids, error)
            if self._to_write:
                self._come()
                return
        some, self._streams = self._streams[:STREAMS_A_TURN], self._streams[STREAMS_A_TURN:]
        if self._streams:
            self._come()
        for stream in some:
            stream.hand_over()


class EngineTokenStream:
    """Stream of the Outputs of one `submit` call. `end(index, reason)` ends request `index` early.

    A waiting reader is woken by a request's first token, by its end, and after every `interval` tokens. (Each wake-up costs a
    write to a socket.) `delivered(index)` is called when the reader of an ended request has consumed its last Output or left
    the stream. `held_s`: total seconds in which Outputs waited for a busy reader."""

    __slots__ = (
        "_clock",
        "_create_future",
        "_delivered",
        "_end",
        "_ended",
        "_fresh",
        "_interval",
        "_is_due",
        "_left",
        "_notifier",
        "_open",
        "_prompts",
        "_reader",
        "_silent",
        "_since_s",
        "_take",
        "_unwritten",
        "_writer_of",
        "_writers",
        "held_s",
    )  # fmt: skip

    def __init__(
        self,
        num_requests: int,
        end: Callable[[int, FinishReason], None],
        interval: int = 1,
        delivered: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        notifier: StreamNotifier | None = None,
        left: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Create a stream of `num_requests` open requests. `notifier`: shared by all streams of an engine; None creates one.
        `left`: function called with the indices of requests that the reader left early, once all of them have ended."""
        self.held_s = 0.0
        self._since_s = 0.0  # time since which Outputs wait for a busy reader; 0 if none wait
        self._ended: list[int] = []  # requests whose last Output was read but not yet reported
        self._end = end
        self._delivered = delivered
        self._left = left
        self._clock = clock
        self._interval = interval
        self._silent = set(range(num_requests))  # requests without any Output so far
        self._open = set(range(num_requests))  # requests that have not ended
        self._fresh: dict[int, Output] = {}  # Outputs since the last read, by request
        self._unwritten: dict[int, list[int]] = {}  # ids that writers did not write; they precede those in `_fresh`
        self._prompts: dict[int, list[TokenLogprobs]] = {}  # prompt logprobs, until the first Output
        self._create_future = asyncio.get_running_loop().create_future
        self._reader: asyncio.Future[Callable[[], Awaitable[None]] | None] | None = None
        self._notifier = notifier or StreamNotifier()
        self._take: Take | None = None  # the reader's function, while it is not busy
        self._is_due = False  # whether it is queued in the notifier
        self._writer_of: WriterOf | None = None
        self._writers: dict[int, TokenWriter | None] = {}  # writers of requests with a first Output

    # --- the engine's side ----------------------------------------------------------------------------------------

    def hold_prompt_logprobs(self, index: int, more: list[TokenLogprobs]) -> None:
        """Append prompt log-probabilities of request `index`. Its first Output will contain them."""
        self._prompts.setdefault(index, []).extend(more)

    def put_ids(self, index: int, token_ids: list[int]) -> bool:
        """Queue `token_ids` for the writer of request `index`. Return False if the caller must use `put` instead, because an
        earlier Output waits or the request has no writer."""
        if self._take is None or self._is_due or self._fresh:
            return False
        writer = self._writers.get(index)
        if writer is None:
            return False
        self._notifier.write(writer, token_ids, self, index)
        return True

    def not_written(self, index: int, token_ids: list[int], error: Exception | None) -> None:
        """Deliver `token_ids`, which a writer could not write, to the reader, before all later ids. If `error` is not None,
        raise it in the reader instead."""
        if error is not None and self._take is not None and self._reader is not None:
            self._fail(self._reader, error)
            return
        if index in self._open or index in self._fresh:
            self._unwritten.setdefault(index, []).extend(token_ids)
            self.put(Output(index, []))

    def put(self, output: Output) -> None:
        """Add an Output for the reader, or merge it into the request's waiting Output. The stream may modify `output` later."""
        index, finish = output.index, output.finish
        if index not in self._open:
            return
        before = self._fresh.get(index)
        if before is None:
            if self._reader is None and not self._fresh:  # an idle reader needs no clock call
                self._since_s = self._clock()
            self._fresh[index] = output
        else:
            output.token_ids, added = before.token_ids, output.token_ids
            output.token_ids += added
            if before.logprobs is not None:
                output.logprobs = [*before.logprobs, *(output.logprobs or ())]
            output.prompt_logprobs = before.prompt_logprobs
            self._fresh[index] = output
        if index in self._prompts:
            self._fresh[index].prompt_logprobs = self._prompts.pop(index)
        if finish is not None:
            self._open.discard(index)
            self._ended.append(index)
        elif self._interval > 1 and index not in self._silent and len(self._fresh[index].token_ids) < self._interval:
            return
        self._silent.discard(index)
        self._wake()

    # --- the reader's side ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_writers()
        if self._open:
            left = [*self._open]
            for index in left:
                self._leave(index, FinishReason.ABORT)
            if self._left is not None:
                self._left(left)
        self._tell_delivered()
        # Holds the stream's requests, so that reference counting frees the stream without the cycle collector.
        self._delivered = self._writer_of = None
        self._writers.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        if self._ended and not self._fresh:  # all ended requests were read
            self._tell_delivered()
        if not self._fresh:
            if not self._open:
                raise StopAsyncIteration
            self._reader = self._create_future()
            await self._reader
            if not self._fresh:  # woken by `stop` of the last request
                raise StopAsyncIteration
        return self._taken()

    def _taken(self) -> list[Output]:
        fresh, self._fresh = self._fresh, {}
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, {}
            for index, token_ids in unwritten.items():
                fresh[index].token_ids = token_ids + fresh[index].token_ids
        if self._since_s:
            self.held_s += self._clock() - self._since_s
            self._since_s = 0.0
        return [*fresh.values()]

    async def hand_to(self, take: Take, writer_of: WriterOf | None = None) -> None:
        """Call `take` with all Outputs, see `TokenStream.hand_to`. Does not wake a task in each step."""
        self._writer_of = writer_of if self._interval == 1 else None
        while self._fresh or self._open:
            if self._fresh:
                rest = self._handed(take)
            else:
                self._reader, self._take = self._create_future(), take
                try:
                    rest = await self._reader
                except asyncio.CancelledError:
                    self._close_writers()
                    raise
                finally:
                    self._reader = self._take = None
            if rest is not None:
                await rest()
            self._tell_delivered()

    def hand_over(self) -> None:
        """Pass the waiting Outputs to the reader's function, unless the reader is busy or has left, or there are none."""
        self._is_due = False
        take, reader = self._take, self._reader
        if take is None or reader is None or reader.done():
            return
        rest = None
        try:
            if self._fresh:
                rest = self._handed(take)
        except Exception as error:
            self._fail(reader, error)
            return
        if rest is not None or not self._open:
            self._take = None
            reader.set_result(rest)
        elif self._ended:
            self._tell_delivered()

    def _handed(self, take: Take) -> Callable[[], Awaitable[None]] | None:
        """Call `take` with all waiting Outputs and return its result. If it returns None, requests may use writers again."""
        outputs = self._taken()
        rest = take(outputs)
        if rest is None and self._writer_of is not None:
            for index in [output.index for output in outputs if output.finish is None]:
                if index not in self._writers:
                    self._writers[index] = self._writer_of(index)
                elif (writer := self._writers[index]) is not None:
                    writer.is_open = True
        return rest

    def _fail(self, reader: asyncio.Future[Any], error: Exception) -> None:
        self._take = None
        self._close_writers()
        if not reader.done():
            reader.set_exception(error)

    def _close_writers(self) -> None:
        for writer in self._writers.values():
            if writer is not None:
                writer.is_open = False

    def stop(self, index: int) -> None:
        self._leave(index, FinishReason.STOP)

    def _leave(self, index: int, reason: FinishReason) -> None:
        self._fresh.pop(index, None)
        self._unwritten.pop(index, None)
        writer = self._writers.pop(index, None)
        if writer is not None:
            writer.is_open = False
        if index in self._open:
            self._open.discard(index)
            self._end(index, reason)
            self._ended.append(index)
            if not self._open:
                self._wake()

    def _tell_delivered(self) -> None:
        ended, self._ended = self._ended, []
        if self._delivered is not None:
            for index in ended:
                self._delivered(index)

    def _wake(self) -> None:
        if self._take is not None:
            if not self._is_due:
                self._is_due = True
                self._notifier.add(self)
            return
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # done: the waiting reader was cancelled
            reader.set_result(None)
