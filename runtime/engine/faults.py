"""Handling of failed steps: decides which requests end, and whether the engine can continue.

- If a row's parameters cannot be bound, only its request ends; the step's other rows restart.
- If a step runs out of memory, all its rows restart. A sequence that is the largest of such steps twice ends.
- Any other error ends the requests of its step.
- If the device is lost, all requests end, and the engine fails permanently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.api import FinishReason
from runtime.batch import ScheduledBatch
from runtime.engine.open_requests import OpenRequests
from runtime.fault import STEP_ERROR, Fault, RowFailed
from runtime.metrics.step_health import StepHealth
from runtime.step import Runner


class DeviceLost(Exception):
    """Error: the device has failed and cannot compute further steps."""


class Faults:
    """Handling of failed steps and lost devices. `death`: future that completes with a reason when the engine has failed
    permanently."""

    def __init__(self, requests: OpenRequests, health: StepHealth, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._health = health
        self._clock = clock
        self._spared: set[int] = set()  # numbers of sequences that were the largest of a step that ran out of memory
        self._lost: BaseException | None = None
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def lose(self, error: BaseException) -> None:
        """Record that the device failed outside a step. The loop's next `check` raises DeviceLost."""
        self._lost = error

    def check(self) -> None:
        """Raise DeviceLost if `lose` has been called."""
        if self._lost is not None:
            raise DeviceLost from self._lost

    def blame(self, error: Exception, batch: ScheduledBatch, runner: Runner) -> None:
        """End the requests that caused the failure of `batch`; others can restart. Raises DeviceLost if the device is lost."""
        if isinstance(error, RowFailed):
            self._requests.end(error.number, FinishReason.ERROR, STEP_ERROR)
            return
        self._health.failed(self._clock())
        fault = runner.fault(error)
        if fault is Fault.LOST:
            raise DeviceLost from error
        if fault is Fault.MEMORY and batch.rows:
            self._spare_or_end(max(batch.rows, key=lambda row: row.num_tokens).number)
        else:
            for row in batch.rows:
                self._requests.end(row.number, FinishReason.ERROR, STEP_ERROR)

    def _spare_or_end(self, largest: int) -> None:
        if largest in self._spared:
            self._requests.end(largest, FinishReason.ERROR, "there is no memory to compute this request")
        self._spared = {*filter(self._requests.by_number.__contains__, {*self._spared, largest})}

    def die(self, error: Exception) -> None:
        """End all requests and complete `death`, because the loop failed with `error`."""
        if isinstance(error, DeviceLost):
            cause = error.__cause__
            where = ", ".join(getattr(cause, "__notes__", ()))
            why = f"the device cannot compute any more: {type(cause).__name__}" + (where and f" ({where})")
        else:
            why = f"the engine died: {type(error).__name__}"
        self.death.set_result(why)
        self._requests.end_all(FinishReason.ERROR, why)
