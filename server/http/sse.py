"""EventStream: response that is a stream of server-sent events.

`EventStream.__call__` owns the token stream's `async with`. Return, error, disconnect and cancellation therefore free the request's
rows and blocks at once; no generator delays this. A source passes items on by function calls, down to the connection's write, so no
task wakes up for a token. A slow reader receives several delayed frames in one chunk. A blocked `send` delays only its own stream.
A second task detects that the client has disconnected, also while no token is sent. It sends empty lines as ping after a silent
interval, also before the first token.

This is a plain ASGI response. sse-starlette's EventSourceResponse is used only for events that are not tokens (`event_source`).
It starts four tasks per stream, polls for shutdown every half second, and replaces uvicorn's signal handling on import. At the
first signal it also cuts streams off instead of draining them. Independent of tokens and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from functools import cache, partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.call import ChunkWriter, call_in
from server.http.watch import ClientWatch

# An empty line ends an event that has no data, which is none (WHATWG HTML, 9.2.6). A comment would be as good by the book, but a
# client that strips what it reads and joins it, as vLLM's benchmark does, would glue it to the next event and lose that.
PING = b"\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class ItemStream(Protocol[T_co]):
    """Stream of items, which is an async context manager. Leaving the context cancels the work that produces the items."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...
    async def hand_to(
        self,
        take: Callable[[T_co], Callable[[], Awaitable[None]] | None],
        writer_of: Callable[[int], Any] | None = None,
    ) -> None:
        """Call `take` with each item, await the function that it returns, if any, and return after the last item. Raises errors
        of `take`. `writer_of`: returns a writer for the items of a choice, which is used instead of `take`; may return None."""
        ...


class Frames(Protocol[T_contra]):
    """Converter of a stream's items to the bytes of the response."""

    def feed(self, item: T_contra) -> bytes:
        """Return the complete events for `item`, or b"". After an exception, only `fail` is called."""
        ...

    def writer(self, index: int, connection: ChunkWriter) -> Any:
        """Return a direct writer of the items of choice `index` to `connection`, or None. Called after the first item."""
        return None

    def end(self) -> bytes:
        """Return the bytes that end the stream."""
        ...

    def fail(self, error: Exception) -> bytes:
        """Return the event that reports `error` to the client."""
        ...


class _Written(Protocol):
    num_written: int  # events, so far


class EventStream(Generic[T]):
    """Response with server-sent events. `open_source` is called before anything is sent, so that its errors become normal error
    responses. `frames` converts items to events. If the connection can be written to directly, `frames.writer` is used instead of
    `frames.feed`. `begin` returns events to send before the first item. `done`: bytes that end the stream.

    `Call.send_body` and `Call.writer` bypass middleware."""

    HEADERS = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect the stream and send it in one piece
    )

    def __init__(
        self, open_source: Callable[[], ItemStream[T]], frames: Frames[T], *, ping_interval_s: float, done: bytes = DONE,
        begin: Callable[[], bytes] | None = None,
    ) -> None:  # fmt: skip
        self._open_source = open_source
        self._frames = frames
        self._ping_interval_s = ping_interval_s
        self._done = done
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_in(scope)
        send_body: Send = call.send_body or send
        writers: list[_Written] = []
        num_before = 0

        async def ping() -> None:
            nonlocal num_before
            before, num_before = num_before, sum(each.num_written for each in writers)
            if num_before == before:
                await send_body({"type": "http.response.body", "body": PING, "more_body": True})

        async with self._open_source() as source, ClientWatch(receive, ping, self._ping_interval_s) as watch:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.HEADERS)})
            last = await self._send_events(source, send_body, call.writer, watch, writers)
            await send_body({"type": "http.response.body", "body": last + self._done, "more_body": False})

    async def _send_events(
        self, source: ItemStream[T], send: Send, make_write: Callable[[], ChunkWriter] | None, watch: ClientWatch,
        writers: list[_Written],
    ) -> bytes:  # fmt: skip
        """Send all events except the last ones, which are returned. Direct writers are appended to `writers`."""
        frames, feed = self._frames, self._frames.feed
        write = None if make_write is None else make_write()

        def writer_of(index: int) -> Any:
            writer = None if write is None else frames.writer(index, write)
            if writer is not None:
                writers.append(writer)
            return writer

        def take(item: T) -> Callable[[], Awaitable[None]] | None:
            body = feed(item)
            if not body:
                return None
            watch.quiet = False
            if write is not None and write(body):
                return None
            return partial(send, {"type": "http.response.body", "body": body, "more_body": True})

        try:
            if self._begin is not None:
                await send({"type": "http.response.body", "body": self._begin(), "more_body": True})
            await source.hand_to(take, None if write is None else writer_of)
            return self._frames.end()
        except Exception as error:
            return self._frames.fail(error)


class JsonLineStream(EventStream[T]):
    """EventStream of JSON lines. It sends no pings, since JSON lines have no comments. The last object ends the stream."""

    HEADERS = ((b"content-type", b"application/x-ndjson"), *EventStream.HEADERS[1:])

    def __init__(self, open_source: Callable[[], ItemStream[T]], frames: Frames[T]) -> None:
        super().__init__(open_source, frames, ping_interval_s=0, done=b"")


@cache
def _event_source_class() -> Any:
    """Return a subclass of sse-starlette's EventSourceResponse, which the first request imports.

    It sends the same pings as other streams. A shutdown does not cut a response off: `Process` drains, and the source ends its
    events. The subclass therefore does not poll for a shutdown, and an idle process sleeps."""
    from sse_starlette import EventSourceResponse, ServerSentEvent

    class EventSource(EventSourceResponse):
        @staticmethod
        async def _listen_for_exit_signal() -> None:
            await asyncio.Event().wait()

    headers = {"Cache-Control": "no-cache"}
    return partial(EventSource, headers=headers, ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"))


def event_source(events: AsyncIterable[bytes], ping_interval_s: float) -> ASGIApp:
    """Return a response of complete `events` that are not tokens. A disconnect ends only this response. `ping_interval_s` 0
    disables pings."""
    response: ASGIApp = _event_source_class()(events, ping=ping_interval_s)
    return response
