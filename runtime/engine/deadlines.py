"""Deadlines: end sequences that have not finished by their deadline, or have not started within the maximum queue time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from enum import Enum

from runtime.api import FinishReason
from runtime.engine.admission import Admission
from runtime.engine.open_requests import OpenRequests
from runtime.sequence import Sequence


class Limit(Enum):
    DEADLINE = "deadline"  # end of the request by its client's limit
    QUEUE_TIME = "queue time"  # maximum time before the start


class RequestDeadlines:
    """Time limits of open requests, on the engine's clock. The loop checks them; a timer does too, because a step may hang.

    Entries of sequences that have ended are removed when their time is over, or when there are too many entries."""

    def __init__(
        self, requests: OpenRequests, admission: Admission, clock: Callable[[], float], num_waiting: Callable[[], int]
    ) -> None:
        self._requests = requests
        self._admission = admission
        self._clock = clock
        self._num_waiting = num_waiting
        self._heap: list[tuple[float, int, Limit]] = []
        self._max_entries = 64
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None

    def limit(self, sequences: Iterable[Sequence], *, continues: bool) -> None:
        """Add the time limits of `sequences`. `continues`: the sequences continue a request that was admitted earlier, so their
        queue time is unlimited."""
        queue_time_s = None if continues else self._admission.limits.max_queue_time_s
        for sequence in sequences:
            if (deadline_s := sequence.request.deadline_s) is not None:
                self._add(deadline_s, sequence.number, Limit.DEADLINE)
            if queue_time_s is not None:
                self._add(self._clock() + queue_time_s, sequence.number, Limit.QUEUE_TIME)
        self._set_timer()

    def end_due(self) -> None:
        if not self._heap or self._heap[0][0] > (now := self._clock()):
            return
        while self._heap and self._heap[0][0] <= now:
            _, number, limit = heapq.heappop(self._heap)
            if limit is Limit.DEADLINE:
                self._requests.end(number, FinishReason.TIMEOUT, "its deadline has passed")
            elif (
                request := self._requests.by_number.get(number)
            ) is not None and request.sequence.first_scheduled_s is None:
                retry_after_s = self._admission.retry_after_s(self._num_waiting())
                self._requests.end(number, FinishReason.TIMEOUT, "it has waited too long to start", retry_after_s)

    def clear(self) -> None:
        """Remove all limits and the timer. Call this only if no request is open."""
        self._heap.clear()
        self._set_timer()

    def _add(self, due_s: float, number: int, limit: Limit) -> None:
        heapq.heappush(self._heap, (due_s, number, limit))
        if len(self._heap) > self._max_entries:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests.by_number]
            heapq.heapify(self._heap)
            self._max_entries = 64 + 2 * len(self._heap)

    def _set_timer(self, *, anew: bool = False) -> None:
        next_s = self._heap[0][0] if self._heap else None
        if next_s == self._timer_s and not anew:
            return
        self._timer_s = next_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_s is not None:
            delay_s = max(0.0, next_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_late)

    def _end_late(self) -> None:
        self.end_due()
        self._set_timer(anew=True)
