"""Deadlines: which sequences end when, if they have not ended by then. Plain data; knows no clock and ends nobody."""

from __future__ import annotations

import heapq
from collections.abc import Container
from enum import Enum


class Limit(Enum):
    DEADLINE = "deadline"  # its client waits no longer
    QUEUE_TIME = "queue time"  # it should have started


class Deadlines:
    """Ends of sequences by number; those of sequences that end before stay until their time, or until there are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Limit]] = []
        self._most = 64

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, due_s: float, number: int, limit: Limit, open_numbers: Container[int]) -> None:
        heapq.heappush(self._heap, (due_s, number, limit))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[1] in open_numbers]
            heapq.heapify(self._heap)
            self._most = 64 + 2 * len(self._heap)

    def take_due(self, now: float) -> list[tuple[int, Limit]]:
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, number, limit = heapq.heappop(self._heap)
            due.append((number, limit))
        return due

    def clear(self) -> None:
        self._heap.clear()
