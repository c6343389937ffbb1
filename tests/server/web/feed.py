"""Feed of dashboard and inspector: its clock in a test's hand, and a history to show."""

from __future__ import annotations

import asyncio
import time

from runtime.api import (
    FinishReason,
    RequestEvent,
    RequestRecord,
    StepRecord,
)
from server.models.dashboard import Feed


class Clock:
    """In place of the feed's seconds: one passes when `tick` is called."""

    def __init__(self, server) -> None:
        self.feed: Feed = server.service.feed
        self.feed._tick = self._wait
        self._turns = asyncio.Semaphore(0)

    async def _wait(self) -> None:
        await self._turns.acquire()

    def tick(self) -> None:
        self._turns.release()


def fill(engine) -> None:
    """A history of three steps and two requests, a second ago."""
    now = time.monotonic() - 1
    engine.steps += [
        StepRecord(1, now, now + 0.05, 500, 0, 0, False, None),
        StepRecord(2, now + 0.05, now + 0.06, 0, 3, 0, True, 0.002),
        StepRecord(3, now + 0.07, now + 0.08, 7, 2, 1, True, 0.01),
    ]
    events = (
        RequestEvent("chunk", now, 400),
        RequestEvent("preempted", now + 0.2, 0),
        RequestEvent("deferred", now + 0.3, 0),
    )
    engine.records += [
        RequestRecord(
            1, "first", now - 0.5, now, now + 0.1, now + 0.5, now + 0.5, 400, 16, 20, FinishReason.STOP, events, now + 0.75, 0.2
        ),
        RequestRecord(2, "second", now, None, None, None, now + 0.5, 9, 0, 0, FinishReason.TIMEOUT, (), now + 0.5),
    ]  # fmt: skip
    engine.kv_cells = bytes([255, 0, 0] * 3 + [0, 255, 0] * 2 + [0, 0, 255] + [0, 0, 0] * 1018)
