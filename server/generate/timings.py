"""Timings of a generation, for APIs that report them: submission, first token and last token."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timings:
    """Times of one request, in seconds. `arrival_s`: time of arrival, by `clock`. A phase that has not started has duration 0."""

    __slots__ = ("_arrival_s", "_begun_s", "_clock", "_first_s", "_last_s")

    def __init__(self, arrival_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrival_s = self._begun_s = arrival_s
        self._first_s: float | None = None
        self._last_s: float | None = None

    def begin(self) -> None:
        """Record the time at which the request is submitted to the engine."""
        self._begun_s = self._clock()

    def note(self) -> None:
        """Record the time at which tokens arrive."""
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def preparing_s(self) -> float:
        """Seconds from arrival to submission: chat template, tokenisation and grammar."""
        return self._begun_s - self._arrival_s

    @property
    def prompt_s(self) -> float:
        """Seconds from submission to the first token, including the time in the queue."""
        return 0.0 if self._first_s is None else self._first_s - self._begun_s

    @property
    def answer_s(self) -> float:
        """Seconds from the first token to the latest token."""
        return 0.0 if self._first_s is None or self._last_s is None else self._last_s - self._first_s

    @property
    def total_s(self) -> float:
        return self.preparing_s + self.prompt_s + self.answer_s
