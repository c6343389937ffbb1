"""Background run: a response that is generated independently of its client's connection.

A task reads the engine's stream to its end, and stores the events if the response can be streamed. Any number of clients read
the events at their own speed. A disconnecting client does not end the response. `finished` is called when the response has
completed, failed or been cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from msgspec.json import encode

from runtime.api import TokenStream
from server.api.frames import named_event
from server.api.response_store import Ongoing
from server.api.responses.api_types import ResponseEvent
from server.api.responses.events import ResponseEvents


class BackgroundRun:
    def __init__(
        self, response_events: ResponseEvents, stream: TokenStream, *, keeps_events: bool, finished: Callable[[], None]
    ) -> None:
        """Start a task that opens and reads `stream`. Must be called on the event loop. `keeps_events`: store the events."""
        self.is_over = False
        self.events: list[bytes] | None = [] if keeps_events else None  # by sequence number
        self._response_events = response_events
        self._finished = finished
        self._waiting: list[asyncio.Future[None]] = []
        self._note(response_events.begin())
        # Nobody can cancel it before its first step, in which it takes charge of the stream: nobody knows its id yet.
        self._task = asyncio.create_task(self._live(stream))

    @property
    def body(self) -> bytes:
        """Current state of the response, encoded as JSON."""
        return encode(self._response_events.body)

    @property
    def status(self) -> str:
        return self._response_events.status

    async def cancel(self) -> None:
        """Cancel the response, and wait until it has ended. Text generated so far is kept."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def news(self) -> None:
        """Wait until there are more events or the response ends."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    async def _live(self, stream: TokenStream) -> None:
        try:
            async with stream:
                async for outputs in stream:
                    for output in outputs:
                        self._note(self._response_events.feed(output))
            last = self._response_events.end()
        except asyncio.CancelledError:
            last = self._response_events.cancel()
        except Exception as error:
            last = self._response_events.fail(error)
        self.is_over = True
        self._note(last)
        self._finished()

    def _note(self, events: list[ResponseEvent]) -> None:
        if self.events is not None:
            self.events += map(named_event, events)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():  # done: its reader was cancelled where it waited
                waiter.set_result(None)


class Replay:
    """HTTP response that streams a stored response's events: first the stored events, then new events."""

    def __init__(self, events: list[bytes], first: int, run: Ongoing | None) -> None:
        """Stream `events` from number `first` on. `run`: adds further events; None if the response has ended."""
        self._events = events
        self._next = first
        self._run = run

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self._next >= len(self._events):
            if self._run is None or self._run.is_over:
                raise StopAsyncIteration
            await self._run.news()
        found = self._events[self._next :]
        self._next = len(self._events)
        return b"".join(found)
