"""Replay: the events of a response that is made in the background, for any client, from where it wants."""

from __future__ import annotations

from typing import Self

from server.api.responses.store import Ongoing


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
