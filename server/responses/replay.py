"""Replay: the events of a response that is made in the background, sent to any client, from where it wants and at its own speed.

sse-starlette's EventSourceResponse sends them, since no token waits for it and a reader who leaves ends nothing. Three things
are decided here: pings are those of other streams; at a shutdown nothing is cut off, since `Process` drains; and so nobody looks
twice a second whether one has begun, for an idle process sleeps. (Its import wraps uvicorn's signal handler, which we never
install.)"""

from __future__ import annotations

import asyncio
from typing import Self

from sse_starlette import EventSourceResponse, ServerSentEvent

from server.responses.store import Ongoing


class Replay:
    """The events of a response from number `first` on: those there are at once, further ones as they come."""

    def __init__(self, events: list[bytes], first: int, run: Ongoing | None) -> None:
        """`run`: which still adds to `events`."""
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


class ReplayResponse(EventSourceResponse):
    """`ping_interval_s`: 0 is never."""

    def __init__(self, replay: Replay, ping_interval_s: float) -> None:
        super().__init__(
            replay, headers={"Cache-Control": "no-cache"}, ping=ping_interval_s, ping_message_factory=_ping
        )

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await asyncio.Event().wait()


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")
