"""EventStream: response that is a stream of server-sent events.

`EventStream.__call__` owns the token stream's `async with`, so return, error, disconnect and cancellation all free the rows and
blocks behind it at once: no generator stands in between. A source passes items on by calls, down to the connection's write, and
no task wakes for a token. A slow reader gets missed items as several frames in one chunk, and a blocked `send` delays only its
own stream. A second task detects that the client has left, also while no token flows, and sends empty lines as ping after a
silent interval, also before the first token.

This is a plain ASGI response. sse-starlette's EventSourceResponse is used only for events that are no tokens
(`event_source`): it starts four tasks per stream, polls for shutdown every half second, replaces uvicorn's signal handling
on import and cuts streams off at the first signal instead of draining. Independent of tokens and JSON."""

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
    """Stream of items, an async context manager. Leaving the context cancels the work behind it."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...
    async def hand_to(
        self,
        take: Callable[[T_co], Callable[[], Awaitable[None]] | None],
        writer_of: Callable[[int], Any] | None = None,
    ) -> None:
        """Call `take` with each item, await its result if any, and return after the last item. Raises errors of `take`.
        Writers of `writer_of` may write items directly instead."""
        ...


class Frames(Protocol[T_contra]):
    """Converter of a source's items to bytes of the stream."""

    def feed(self, item: T_contra) -> bytes:
        """Return complete events, or b"". After an exception, only `fail` is called."""
        ...

    def writer(self, index: int, connection: ChunkWriter) -> Any:
        """Return a writer of the items of choice `index` directly to `connection`, or None. Called after the first item."""
        return None

    def end(self) -> bytes:
        """Return the bytes at the end of the stream."""
        ...

    def fail(self, error: Exception) -> bytes:
        """Return the event that reports `error` to the client."""
        ...


class _Written(Protocol):
    num_written: int  # events, so far


class EventStream(Generic[T]):
    """Response with server-sent events. `open_source` is called before anything is sent, so that its errors become normal error
    responses.

    If frames have a `writer(index, connection)` and the connection can write directly, the source uses it, bypassing `feed`.

    `begin` returns events before the first item. `Call.send_body` and `Call.writer` bypass middleware."""

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
        """Send all events except the last ones, which are returned. Direct writers are added to `writers`."""
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
    """EventStream of JSON lines. There are no pings, since JSON lines have no comments. The last object ends the stream."""

    HEADERS = ((b"content-type", b"application/x-ndjson"), *EventStream.HEADERS[1:])

    def __init__(self, open_source: Callable[[], ItemStream[T]], frames: Frames[T]) -> None:
        super().__init__(open_source, frames, ping_interval_s=0, done=b"")


@cache
def _event_source_class() -> Any:
    """Return a subclass of sse-starlette's EventSourceResponse, imported by the first request that needs it.

    Differences: pings are those of other streams. A shutdown cuts nothing off, since `Process` drains and the source of events
    ends them, so nothing polls for one either: an idle process sleeps. (Its import wraps uvicorn's signal handler, which we
    never install.)"""
    from sse_starlette import EventSourceResponse, ServerSentEvent

    class EventSource(EventSourceResponse):
        @staticmethod
        async def _listen_for_exit_signal() -> None:
            await asyncio.Event().wait()

    headers = {"Cache-Control": "no-cache"}
    return partial(EventSource, headers=headers, ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"))


def event_source(events: AsyncIterable[bytes], ping_interval_s: float) -> ASGIApp:
    """Return a response of complete `events` other than tokens. Disconnecting stops nothing else. `ping_interval_s` 0: no
    pings."""
    response: ASGIApp = _event_source_class()(events, ping=ping_interval_s)
    return response
