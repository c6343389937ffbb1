"""Arrival times of open-loop requests: a Poisson process, bursts, a ramp, or a trace.

Times are seconds after the first arrival; equal random sources give equal times."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

KINDS = "poisson:RATE, poisson:RATE:BURSTINESS, bursts:SIZE:SECONDS or ramp:FROM:TO"


class Arrivals(Protocol):
    @property
    def rate_per_s(self) -> float | None:
        """Mean rate in requests per second; None if it depends on the number of arrivals."""
        ...

    def moments_s(self, count: int, rng: random.Random) -> list[float]:
        """Return `count` ascending arrival times in seconds; the first is 0."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Arrivals with gamma-distributed gaps. `burstiness`: shape of the gamma distribution, as in vLLM. 1 is a Poisson process,
    values below 1 are burstier, values above 1 more regular."""

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.rate_per_s < math.inf and 0 < self.burstiness < math.inf):
            raise ValueError("the rate of arrivals, and their burstiness, must be positive and finite")

    def moments_s(self, count: int, rng: random.Random) -> list[float]:
        moments = [0.0]
        while len(moments) < count:
            moments.append(moments[-1] + self._gap_s(rng))
        return moments

    def _gap_s(self, rng: random.Random) -> float:
        if self.burstiness == 1.0:
            return rng.expovariate(self.rate_per_s)
        return rng.gammavariate(self.burstiness, 1 / (self.rate_per_s * self.burstiness))

    def describe(self) -> str:
        return f"{self.rate_per_s:g}/s" + (f" of burstiness {self.burstiness:g}" if self.burstiness != 1.0 else "")


@dataclass(frozen=True, slots=True)
class Bursts:
    """Bursts of `size` simultaneous requests, one burst every `period_s` seconds."""

    size: int
    period_s: float

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 < self.period_s < math.inf:
            raise ValueError("bursts have at least one request, and a finite time between them")

    @property
    def rate_per_s(self) -> float:
        return self.size / self.period_s

    def moments_s(self, count: int, rng: random.Random) -> list[float]:
        return [self.period_s * (index // self.size) for index in range(count)]

    def describe(self) -> str:
        return f"bursts of {self.size} every {self.period_s:g} s"


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson process whose rate changes linearly over the run, from `first_per_s` to `last_per_s`."""

    first_per_s: float
    last_per_s: float

    def __post_init__(self) -> None:
        if not (0 < self.first_per_s < math.inf and 0 < self.last_per_s < math.inf):
            raise ValueError("the rates of a ramp must be positive and finite")

    @property
    def rate_per_s(self) -> float:
        return (self.first_per_s + self.last_per_s) / 2

    def moments_s(self, count: int, rng: random.Random) -> list[float]:
        """Return the arrival times: those of a process of rate 1, mapped by the inverse of the expected number of arrivals."""
        unit = Poisson(1.0).moments_s(count, rng)
        return [self._moment_s(expected, count) for expected in unit]

    def _moment_s(self, expected: float, count: int) -> float:
        duration_s = count / self.rate_per_s
        if expected >= count:  # the process is late: on at the last rate
            return duration_s + (expected - count) / self.last_per_s
        growth = (self.last_per_s - self.first_per_s) / duration_s
        if abs(growth) < 1e-12:
            return expected / self.first_per_s
        return (math.sqrt(self.first_per_s**2 + 2 * growth * expected) - self.first_per_s) / growth

    def describe(self) -> str:
        return f"{self.first_per_s:g}/s to {self.last_per_s:g}/s"


@dataclass(frozen=True, slots=True)
class Replay:
    """Arrival times of a recorded trace."""

    seconds: tuple[float, ...]

    @property
    def rate_per_s(self) -> float | None:
        return len(self.seconds) / self.seconds[-1] if self.seconds and self.seconds[-1] else None

    def moments_s(self, count: int, rng: random.Random) -> list[float]:
        if count > len(self.seconds):
            raise ValueError(f"the trace has {len(self.seconds)} requests, not {count}")
        return list(self.seconds[:count])

    def describe(self) -> str:
        return f"as recorded, {self.seconds[-1]:.0f} s"


def parse(text: str) -> Arrivals:
    """Return the arrival process that `text` describes, in one of the forms of KINDS. Raises ValueError."""
    kind, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    match kind, values:
        case "poisson", [rate] | [rate, _]:
            return Poisson(rate, *values[1:])
        case "bursts", [size, period_s] if size.is_integer():
            return Bursts(int(size), period_s)
        case "ramp", [first, last]:
            return Ramp(first, last)
    raise ValueError(f"{text!r} is not {KINDS}")
