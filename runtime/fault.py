"""Severity of a failed step. The thread that launches steps classifies errors; the engine handles each severity differently."""

from __future__ import annotations

from enum import Enum

STEP_ERROR = "the engine failed to compute this request"


class Fault(Enum):
    """Severity of a failed step. STEP: only this step failed. MEMORY: it ran out of memory; a smaller step may succeed. LOST:
    this process cannot compute any further step, because the device failed or the worker thread ended."""

    STEP = "step"
    MEMORY = "memory"
    LOST = "lost"


class WorkerGone(Exception):
    """Error: the worker thread has ended, so work that was submitted to it will not run."""


class RowFailed(Exception):
    """Error: the request of sequence `number` cannot be executed. Other rows of the same step are not affected."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the parameters of sequence {number} cannot be bound to its row")
        self.number = number


def host_fault(error: BaseException) -> Fault:
    """Return the severity of `error`, which was raised by a step on the CPU."""
    if isinstance(error, WorkerGone):
        return Fault.LOST
    # torch's allocator for the CPU raises a RuntimeError.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return Fault.MEMORY
    return Fault.STEP
