"""Lane: the place where steps are computed in order, and the notification of the event loop. Provided by the platform.

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
    """Whole step in progress. `value`, once `done`: result of its work. `idle_before_s`, once `done`: idle time of the
    device before it, None if unknown."""

    value: Callable[[], Any]
    done: GpuEvent
    idle_before_s: Callable[[], float | None]


class Lane(Protocol):
    """Call it on the event loop."""

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        """Submit the first part of a step; or, where nothing `opens` by it, what comes between the parts of others."""
        ...

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        """Submit the rest of a step, or all of it. `brief`: it takes so little that a thread may watch for its end all the time."""
        ...

    def beside(self, work: Callable[[], Sequence[Tensor]], name: str = "encoder") -> asyncio.Future[Any]:
        """Submit work that runs beside steps. Work of one `name` runs in order, on a thread of its own.

        When the future is done, steps submitted later may read the tensors that `work` returned. The future raises errors of
        `work` or of the device."""
        ...

    def fault_beside(self, error: BaseException) -> Fault:
        """Classify an error of work beside steps, as `fault` does."""
        ...

    def ids_to_host(self, ids: Tensor) -> Tensor:
        """Start a copy, in a step's work: its ids [n] int64 on their way to the host, to be read before as many steps more as can
        be in flight have been launched."""
        ...

    def reader(self, read: Callable[[], Any]) -> Callable[[], Any]:
        """Make a reader, in a step's work: what gives, once the step is done, what `read` makes of tensors on the host."""
        ...

    def synchronize(self) -> None:
        """Wait, on the thread that builds, for all that was computed there."""
        ...

    def fault(self, error: BaseException) -> Fault:
        """Classify an error of a step, raised when it was submitted or awaited. Does not wait."""
        ...

    async def close(self) -> bool:
        """Close. Return False if a computation did not end; its device must not be used again."""
        ...

    def stop(self) -> None:
        """Close it, of a runner that never served."""
        ...
