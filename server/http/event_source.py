"""EventSource: sends events that no token waits for. Imported by the first request for some.

sse-starlette's EventSourceResponse sends them, since a reader who leaves ends nothing. Three things are decided here: pings are
those of other streams; at a shutdown nothing is cut off, since `Process` drains, and who makes events ends them; and so nobody
looks twice a second whether one has begun, for an idle process sleeps. (Its import wraps uvicorn's signal handler, which we never
install.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

from sse_starlette import EventSourceResponse, ServerSentEvent


class EventSource(EventSourceResponse):
    """`events`: whole ones, as they go out. `ping_interval_s`: 0 is never."""

    def __init__(self, events: AsyncIterable[bytes], ping_interval_s: float) -> None:
        super().__init__(
            events, headers={"Cache-Control": "no-cache"}, ping=ping_interval_s, ping_message_factory=_ping
        )

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await asyncio.Event().wait()


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")
