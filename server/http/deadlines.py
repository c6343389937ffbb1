"""Deadlines: moments by which a connection has to have gone on, all of them behind one timer.

The span of a phase is a constant, so whoever entered it first is due first: a queue for each span, in the order of entering, in
place of a timer for each of ten thousand connections. Where nobody is connected there is no timer, and the process sleeps."""

from __future__ import annotations

import asyncio
from itertools import islice, takewhile
from typing import Protocol

MAX_AT_ONCE = 50  # overdue in one turn of the loop: to end thousands of them takes longer than a stream may wait


class Timed(Protocol):
    """Who may be overdue. `deadline_queue` is written here alone."""

    deadline_queue: dict[Timed, float] | None

    def overdue(self) -> None:
        """The deadline has passed, and is not set any more."""
        ...


class Deadlines:
    def __init__(self) -> None:
        self._queues: dict[float, dict[Timed, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, who: Timed, span_s: float) -> None:
        """`who` is overdue in `span_s` seconds, or never if that is 0; what was set before counts no longer."""
        self.clear(who)
        if span_s <= 0:
            return
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(span_s, {})
        due_s = queue[who] = loop.time() + span_s
        who.deadline_queue = queue
        if self._timer is None or due_s < self._timer.when():
            self._ring_at(loop, due_s)

    def clear(self, who: Timed) -> None:
        if who.deadline_queue is not None:
            del who.deadline_queue[who]
            who.deadline_queue = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def expire(self, now_s: float) -> None:
        """Tells whoever is overdue at `now_s`, in seconds of the loop's clock; some of them, if they are many."""
        due: list[tuple[Timed, dict[Timed, float]]] = []
        for queue in self._queues.values():
            passed = takewhile(lambda entry: entry[1] <= now_s, queue.items())
            due += ((who, queue) for who, _ in islice(passed, MAX_AT_ONCE))
        for who, queue in due:
            if who.deadline_queue is queue:  # the one before may have ended it
                self.clear(who)
                who.overdue()

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        self.expire(loop.time())
        following = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        if following:
            self._ring_at(loop, min(following))

    def _ring_at(self, loop: asyncio.AbstractEventLoop, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when_s, self._ring)
