"""Probes: test whether the device still computes steps."""

from __future__ import annotations

import asyncio
from typing import Any

from runtime.batch import NOT_FINITE
from runtime.step import StepResult


class Probes:
    """Callers of `EngineClient.probe` that wait for the next completed step."""

    def __init__(self) -> None:
        self._next: asyncio.Future[bool] | None = None

    async def next_step(self, death: asyncio.Future[str]) -> bool:
        """Wait for the next completed step and return True. Return False if no work is left or the engine has failed."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        waiting = self._next
        either: list[asyncio.Future[Any]] = [waiting, death]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done() and waiting.result()

    def settled(self, result: StepResult) -> None:
        """Inform waiting probes that a step has completed, unless it sampled rows and all their logits were not finite."""
        if self._next is not None and (not result.tokens or any(ids != [NOT_FINITE] for ids in result.tokens)):
            self._answer(True)

    def idle(self) -> None:
        self._answer(False)

    def _answer(self, has_settled: bool) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(has_settled)
