"""CudaLane: steps enqueued by the event loop itself, on one stream, behind what was enqueued before; nothing here waits.

The loop's thread may feed several devices whose steps do not wait for each other: each lane has it compute on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor

from ops.transfer import is_remote, to_host
from runtime.fault import Fault
from runtime.platform.cuda_errors import cuda_fault
from runtime.platform.cuda_event import EventWaiter
from runtime.platform.side_stream import SideStream
from runtime.runner.lane import Launched, Part
from runtime.runner.worker import Worker
from runtime.step import GpuEvent


class CudaLane:
    """`worker`: whoever built the engine, with nothing left to do but to be closed."""

    def __init__(
        self, max_num_seqs: int, steps_in_flight: int, device: torch.device, worker: Worker | None = None
    ) -> None:
        self._worker, self._device = worker, device
        self._waiter = EventWaiter()
        self._side: SideStream | None = None
        # One more than can be under way: the ids of the oldest have been read when its turn comes again.
        self._host_ids = cycle(
            [
                torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=is_remote(device))
                for _ in range(steps_in_flight + 1)
            ]
        )
        self._last_end: torch.cuda.Event | None = None

    def _own_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self._device) if is_remote(self._device) else nullcontext()

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        with self._own_device():
            started = recorded() if opens else None
            value = work()
        return Part(lambda: value, self._end_so_far, started)

    def _end_so_far(self) -> GpuEvent:
        with self._own_device():
            return self._waiter.after(recorded(blocking=True))  # late, but nothing was enqueued since

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        with self._own_device():
            # Whoever comes to an idle device waits for this step alone, and its end wakes a sleeping thread late; behind others
            # there is time.
            is_alone = brief and (self._last_end is None or self._last_end.query())
            started = recorded() if behind is None else cast("torch.cuda.Event | None", behind.started)
            value = work()
            ended = recorded(blocking=not is_alone)
        previous, self._last_end = self._last_end, ended

        def idle_before_s() -> float | None:
            return None if previous is None or started is None else previous.elapsed_time(started) / 1e3

        return Launched(lambda: value, self._waiter.after(ended), idle_before_s)

    def beside(self, work: Callable[[], Sequence[Tensor]]) -> asyncio.Future[Any]:
        if self._side is None:
            self._side = SideStream(self._device)
        return self._side.run(work)

    def fault_beside(self, error: BaseException) -> Fault:
        return CudaLane.fault(self, error)

    def ids_to_host(self, ids: Tensor) -> Tensor:
        host = next(self._host_ids)
        if len(ids) > len(host):  # several a row
            return to_host(ids)
        return host[: len(ids)].copy_(ids, non_blocking=True)

    def reader(self, read: Callable[[], Any]) -> Callable[[], Any]:
        return read

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def fault(self, error: BaseException) -> Fault:
        with self._own_device():
            fault = cuda_fault(error)
        if fault is Fault.MEMORY:
            torch.cuda.empty_cache()  # what is kept for tensors of other sizes may be what is missing
        return fault

    async def close(self) -> bool:
        side_has_ended = self._side is None or await self._side.close()
        self.stop()
        return side_has_ended and self._waiter.has_ended and (self._worker is None or await self._worker.close())

    def stop(self) -> None:
        self._waiter.close()


def recorded(*, blocking: bool = False) -> torch.cuda.Event:
    """What this thread has enqueued so far."""
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)
    event.record()
    return event
