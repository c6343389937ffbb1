"""Lane: executes the work of steps in order and notifies the event loop. Provided by the platform.

It is a computing thread, or a device queue that the event loop fills; a runner is independent of the choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from runtime.fault import Fault
from runtime.step import GpuEvent

T = TypeVar("T")


class Part(NamedTuple):
    """First part of a step in progress.

    `value`: for later work of the lane; returns the part's result or raises its error. `done`: ready when all work submitted
    so far has run; may cost an event. `started`: internal to the lane."""

    value: Callable[[], Any]
    done: Callable[[], GpuEvent]
    started: object = None


class Launched(NamedTuple):
    """Whole step in progress. Once `done`: `value` returns the result of its work, and `idle_before_s` the idle time of the
    device before it, None if unknown."""

    value: Callable[[], Any]
    done: GpuEvent
    idle_before_s: Callable[[], float | None]


class Lane(Protocol):
    """Interface of a lane. Called on the event loop."""

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        """Submit the first part of a step. `opens` False: submit work between the parts of other steps."""
        ...

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        """Submit the rest of a step, or all of it. `brief`: the step is so short that a thread may busy-wait for its end."""
        ...

    def beside(self, work: Callable[[], Sequence[Tensor]], name: str = "encoder") -> asyncio.Future[Any]:
        """Submit work that runs in parallel with steps. Work with the same `name` runs in order, on its own thread.

        When the future is done, steps submitted later may read the tensors that `work` returned. The future raises errors of
        `work` or of the device."""
        ...

    def fault_beside(self, error: BaseException) -> Fault:
        """Classify an error of `beside` work, as `fault` does."""
        ...

    def ids_to_host(self, ids: Tensor) -> Tensor:
        """Start copying a step's ids [n] int64 to the host, within the step's work. The host must read them before as many
        further steps are launched as can be in flight."""
        ...

    def reader(self, read: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that returns `read()`, which reads host tensors, once the step is done. Called in a step's work."""
        ...

    def synchronize(self) -> None:
        """Block the building thread until all its computations are done."""
        ...

    def fault(self, error: BaseException) -> Fault:
        """Classify an error of a step, raised when it was submitted or awaited. Does not wait."""
        ...

    async def close(self) -> bool:
        """Close. Return False if a computation did not end; its device must not be used again."""
        ...

    def stop(self) -> None:
        """Close the lane of a runner that never served."""
        ...
