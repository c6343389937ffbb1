"""Clock of all measurements, which tests replace."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        ...

    async def sleep_until(self, moment_s: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, moment_s: float) -> None:
        await asyncio.sleep(max(0.0, moment_s - self.now()))
