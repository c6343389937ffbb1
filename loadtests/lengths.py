"""Lengths of a workload's prompts or answers in tokens: constant, uniform between bounds, or log-normal."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

_PATTERN = re.compile(r"(\d+)(?:-(\d+))?|~(\d+)")
SIGMA = 1.0  # of the logarithm, about what public logs of chats show for prompts and for answers
SPREAD = 16  # a log-normal length stays between the median over this and the median times this


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of lengths from `low` to `high`, both included. It is log-normal around `median` if given, else uniform."""

    low: int
    high: int
    median: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"lengths go from at least 1 upwards, not from {self.low} to {self.high}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse `512`, `1000-4000` (uniform) or `~200` (log-normal with that median). Raises ValueError."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a length: use N, LOW-HIGH or ~MEDIAN")
        low, high, median = (int(group) if group else None for group in match.groups())
        if median is not None:
            return cls(max(1, median // SPREAD), median * SPREAD, median)
        assert low is not None
        return cls(low, low if high is None else high)

    def draw(self, rng: random.Random) -> int:
        if self.low == self.high:
            return self.low
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = round(rng.lognormvariate(math.log(self.median), SIGMA))
        return min(max(drawn, self.low), self.high)

    def __str__(self) -> str:
        if self.median is not None:
            return f"about {self.median}"
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
