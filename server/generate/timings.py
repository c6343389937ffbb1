"""Timings: when a generation was handed to the engine, and when its first and its last tokens came, for APIs that tell that."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timings:
    """Times of a request. `arrival_s`: when it arrived, by `clock`. What has not happened yet takes no time."""

    __slots__ = ("_arrival_s", "_begun_s", "_clock", "_first_s", "_last_s")

    def __init__(self, arrival_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrival_s = self._begun_s = arrival_s
        self._first_s: float | None = None
        self._last_s: float | None = None

    def begin(self) -> None:
        """The engine gets the request now."""
        self._begun_s = self._clock()

    def note(self) -> None:
        """Note that tokens came."""
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def preparing_s(self) -> float:
        """Seconds until the engine had the request: template, tokens and grammar."""
        return self._begun_s - self._arrival_s

    @property
    def prompt_s(self) -> float:
        """Seconds from then until the first token, including the queue."""
        return 0.0 if self._first_s is None else self._first_s - self._begun_s

    @property
    def answer_s(self) -> float:
        """Seconds from the first token to the latest."""
        return 0.0 if self._first_s is None or self._last_s is None else self._last_s - self._first_s

    @property
    def total_s(self) -> float:
        return self.preparing_s + self.prompt_s + self.answer_s
