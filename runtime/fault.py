"""Fault: effect of a failed step on the engine. A lane classifies its device's errors; the engine acts on the class."""

from __future__ import annotations

from enum import Enum

STEP_ERROR = "the engine failed to compute this request"


class Fault(Enum):
    """STEP: this step, and nothing else. MEMORY: there was none left for it; a smaller one may go. LOST: no step can be computed
    any more, by this process: its device has failed, or the thread that computes is gone."""

    STEP = "step"
    MEMORY = "memory"
    LOST = "lost"


class WorkerGone(Exception):
    """The thread that computes has ended; what it was given will not be computed."""


class RowFailed(Exception):
    """Error: the request of sequence `number` cannot be executed. Other rows of its step are not affected."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the parameters of sequence {number} cannot be bound to its row")
        self.number = number


def host_fault(error: BaseException) -> Fault:
    """The kind of an error where host and device are the same."""
    if isinstance(error, WorkerGone):
        return Fault.LOST
    # torch's allocator for the CPU raises a RuntimeError.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return Fault.MEMORY
    return Fault.STEP
