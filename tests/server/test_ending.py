"""Signals that the event loop does not get to."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from server.process import ending
from server.process.ending import OBEY_LIMIT_S, SignalWatch

LIMIT_S = 600.0


@pytest.fixture
async def handled():
    loop = asyncio.get_running_loop()
    for number in ending.SIGNALS:
        loop.add_signal_handler(number, lambda: None)
    yield
    for number in ending.SIGNALS:
        loop.remove_signal_handler(number)


@pytest.mark.parametrize(
    ("second", "at_s", "counts"),
    [(signal.SIGTERM, 5.15, False), (signal.SIGTERM, 5.3, True), (signal.SIGINT, 5.15, True)],
    ids=["the same in a moment", "the same later", "another in a moment"],
)
async def test_while_the_loop_hangs_a_signal_that_comes_twice_in_a_moment_is_one_too(
    handled, monkeypatch, second, at_s, counts
):
    asked, left, now_s = threading.Semaphore(0), [], 0.0
    timers: list[tuple[float, threading.Timer]] = []

    def clock() -> float:
        asked.release()
        return now_s

    def timer(limit_s, act) -> threading.Timer:
        timers.append((limit_s, threading.Timer(limit_s, act)))  # which nobody starts
        return timers[-1][1]

    monkeypatch.setattr(ending, "_timer", timer)
    monkeypatch.setattr(ending, "leave_at_once", lambda code, why: left.append(code))
    with SignalWatch(LIMIT_S, clock):  # nothing is awaited in here: the loop hangs
        # The third is the first once more: when it is looked at, what follows from the second is there.
        for time_s, number in ((5.0, signal.SIGTERM), (at_s, second), (5.0, signal.SIGTERM)):
            now_s = time_s
            os.kill(os.getpid(), number)
            assert asked.acquire(timeout=60)
        assert [limit_s for limit_s, _ in timers] == [LIMIT_S, OBEY_LIMIT_S][: 1 + counts]
        for _, each in timers[1:]:
            each.function()
        assert left == [128 + second] * counts
