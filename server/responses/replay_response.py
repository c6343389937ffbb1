"""ReplayResponse: sends a Replay, at its reader's own speed. Imported by the first request for one.

sse-starlette's EventSourceResponse sends it, since no token waits for it and a reader who leaves ends nothing. Three things
are decided here: pings are those of other streams; at a shutdown nothing is cut off, since `Process` drains; and so nobody looks
twice a second whether one has begun, for an idle process sleeps. (Its import wraps uvicorn's signal handler, which we never
install.)"""

from __future__ import annotations

import asyncio

from sse_starlette import EventSourceResponse, ServerSentEvent

from server.responses.replay import Replay


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
