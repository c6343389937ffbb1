"""Group: exchanges tensors between the ranks of a model, each of which runs on its own host thread.

All ranks run the same steps in the same order. A `Meeting` connects the ranks within one step: the k-th step of each rank uses
the k-th meeting. If a rank fails in a step, the others fail in that step too instead of waiting; other steps are unaffected.
Each rank computes sums by itself in rank order, so results are bit-identical on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

import ops
from runtime.fault import WorkerGone

T = TypeVar("T")


class Apart(RuntimeError):
    """Error: another rank or stage has failed in the same step, or has ended."""


class Gone(Apart, WorkerGone):
    """Error: a rank or stage has ended and will compute no further step. A note on the error names it, if known."""

    def __init__(self, where: str = "") -> None:
        super().__init__("another rank has ended")
        if where:
            self.add_note(where)


class Peers(Protocol):
    """Collective operations of rank `number` of `size`. All ranks must call the same methods in the same order."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks as a new tensor. `x` has the same shape on every rank."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `ops.add_rms_norm(sum of x over all ranks, residual, weight, eps)`. `x` is [T, H]."""
        ...

    def concat(self, x: Tensor) -> Tensor:
        """Return [T, size * N]: the columns of `x` [T, N] of all ranks, in rank order."""
        ...


class Meeting:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor | None] = [None] * size
        self._gone: Gone | None = None

    def exchange(self, number: int, x: Tensor, made_of: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Pass the `x` of all ranks to `made_of` and return its result, once all ranks have it. `number`: this rank's number."""
        self._given[number] = x
        try:
            self._barrier.wait()
            made = made_of([each for each in self._given if each is not None])
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise self._gone or Apart("another rank has failed in this step") from error
        return made

    def leave(self, gone: Gone | None = None) -> None:
        """Fail all exchanges of this step, because a rank has failed in it or has ended. `gone`: the error if it has ended."""
        self._gone = self._gone or gone
        self._barrier.abort()


class Group:
    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._steps = [0] * size  # meetings claimed by each rank
        self._unclaimed: dict[int, Meeting] = {}  # meetings that some rank has not claimed
        self._under_way: WeakSet[Meeting] = WeakSet()
        self._ended: Gone | None = None

    def claim(self, number: int) -> Meeting:
        """Return the Meeting that connects all ranks in the next step of rank `number`. Raises Gone if a rank has ended."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            step = self._steps[number]
            self._steps[number] += 1
            meeting = self._unclaimed.setdefault(step, Meeting(self.size))
            self._under_way.add(meeting)
            if min(self._steps) > step:
                del self._unclaimed[step]  # ranks that have claimed it keep it
            return meeting

    def end(self, where: str = "") -> None:
        """Fail all current and later waits, because a rank has ended. `where`: name of the rank, if known."""
        with self._lock:
            self._ended = self._ended or Gone(where)
            for meeting in list(self._under_way):
                meeting.leave(self._ended)


class HostRank:
    """Rank `number` of a group, whose steps run on one thread. See `Peers`. `device`: number of its device. `everyone`: this
    rank in the group of all stages' ranks, used at start-up; this object itself if there is one stage."""

    def __init__(self, group: Group, number: int, device: int | None = None, everyone: HostRank | None = None) -> None:
        self.group, self.number, self.size = group, number, group.size
        self.device = number if device is None else device
        self.everyone = self if everyone is None else everyone
        self.is_alone = False
        self._meeting: Meeting | None = None

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Disable exchanges within the context, for work that other ranks do not run. The results have no meaning."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def within(self, meeting: Meeting, work: Callable[[], T]) -> T:
        """Run `work`, which all ranks run at the same time, and return its result. `meeting`: connects the ranks meanwhile."""
        self._meeting = meeting
        try:
            return work()
        except BaseException:
            meeting.leave()
            raise
        finally:
            self._meeting = None

    def sum(self, x: Tensor) -> Tensor:
        return self._exchange(x, _sum)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.add_rms_norm(self.sum(x), residual, weight, eps)

    def concat(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda every: torch.cat([*every], dim=1))

    def least(self, number: int) -> int:
        """Return the minimum of `number` over all ranks of all stages."""
        return int(self.everyone.concat(torch.tensor([[number]])).min())

    def _exchange(self, x: Tensor, made_of: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        if self.is_alone:
            return made_of([x] * self.size)
        assert self._meeting is not None, "ranks exchange tensors within a step"
        return self._meeting.exchange(self.number, x, made_of)


def _sum(every: Sequence[Tensor]) -> Tensor:
    total = every[0] + every[1]
    for each in every[2:]:
        total += each
    return total
