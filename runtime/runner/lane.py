"""Lane: executes the work of steps in launch order, and notifies the event loop when it ends. Each platform implements it.

A lane is a worker thread on a CPU, or a device queue that the event loop fills. The runner is the same for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from runtime.fault import Fault
from runtime.step import GpuEvent

T = TypeVar("T")


class Part(NamedTuple):
    """First part of a step, such as its forward pass, after it was submitted.

    `value`: function for later work of the lane; returns the part's result or raises its error. `done`: function that returns
    an event, set when all work submitted so far has run; it may cost time. `started`: internal to the lane."""

    value: Callable[[], Any]
    done: Callable[[], GpuEvent]
    started: object = None


class Launched(NamedTuple):
    """A step that has been submitted completely. After `done`, `value` returns the result of its work. `idle_before_s` returns
    the seconds that the device was idle before the step, or None if unknown."""

    value: Callable[[], Any]
    done: GpuEvent
    idle_before_s: Callable[[], float | None]


class Lane(Protocol):
    """Interface of a lane (see the module). Call it on the event loop."""

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        """Submit the first part of a step. If `opens` is False, the work starts no step and runs between the parts of others."""
        ...

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        """Submit the rest of a step after `behind`, or a whole step. `brief`: a thread may busy-wait for the end of the step."""
        ...

    def beside(self, work: Callable[[], Sequence[Tensor]], name: str = "encoder") -> asyncio.Future[Any]:
        """Submit work that runs in parallel with steps. Work with the same `name` runs in order, on its own thread.

        When the future is done, steps submitted later may read the tensors that `work` returned. The future raises errors of
        `work` or of the device."""
        ...

    def fault_beside(self, error: BaseException) -> Fault:
        """Return the severity of an error raised by work that was passed to `beside`. See `fault`."""
        ...

    def ids_to_host(self, ids: Tensor) -> Tensor:
        """Start copying a step's ids [n] int64 to the host, and return the host tensor. Its memory is reused once as many
        further steps have been launched as may be in flight. Called within the step's work."""
        ...

    def reader(self, read: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that returns the result of `read`, which reads host tensors. It is called when the step is done."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all its computations on the device have run."""
        ...

    def fault(self, error: BaseException) -> Fault:
        """Return the severity of an error that was raised when a step was submitted or awaited. Does not wait."""
        ...

    async def close(self) -> bool:
        """Close the lane. Return False if a computation did not end. The device must then not be used again."""
        ...

    def stop(self) -> None:
        """Close the lane of a runner that has never executed a step."""
        ...
