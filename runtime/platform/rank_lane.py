"""RankLane: the CUDA lane of one rank: steps are enqueued by the rank's own thread, since kernels of one device wait for those of
another, and a thread that fed both could stand before a full queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import torch

from runtime.fault import Fault, RowFailed
from runtime.platform.cuda_event import CudaEvent
from runtime.platform.cuda_lane import CudaLane, recorded
from runtime.runner.lane import Launched, Part
from runtime.runner.rank_worker import RankWorker
from runtime.step import GpuEvent


class RankLane(CudaLane):
    def __init__(self, max_num_seqs: int, steps_in_flight: int, device: torch.device, worker: RankWorker) -> None:
        super().__init__(max_num_seqs, steps_in_flight, device, worker)
        self._rank = worker

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        begun: Future[tuple[Any, torch.cuda.Event | None]] = Future()
        part = self._rank.of_step(work)

        def run() -> None:
            try:
                started = recorded() if opens else None
                begun.set_result((part(), started))
            except BaseException as error:
                begun.set_exception(error)  # for what is submitted behind it to raise

        self._rank.enqueue(run)
        return Part(lambda: begun.result()[0], self._end_so_far, begun)

    def _end_so_far(self) -> GpuEvent:
        return self._ends(lambda: recorded(blocking=True))

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        values: list[Any] = []
        events: list[tuple[torch.cuda.Event | None, torch.cuda.Event | None]] = []

        def run() -> torch.cuda.Event:
            if behind is None:
                started: torch.cuda.Event | None = recorded()
            else:
                started = cast("Future[tuple[Any, torch.cuda.Event | None]]", behind.started).result()[1]
            values.append(work())
            ended = recorded(blocking=True)
            previous, self._last_end = self._last_end, ended
            events.append((previous, started))
            return ended

        def idle_before_s() -> float | None:
            previous, started = events[0]
            return None if previous is None or started is None else previous.elapsed_time(started) / 1e3

        return Launched(lambda: values[0], self._ends(run), idle_before_s)

    def fault(self, error: BaseException) -> Fault:
        """The others are in the midst of a step that this rank does not compute: none of them comes out of it."""
        return Fault.STEP if isinstance(error, RowFailed) else Fault.LOST

    def _ends(self, run: Callable[[], torch.cuda.Event]) -> GpuEvent:
        """When the event that `run` records, on the rank's thread, has happened."""
        done = asyncio.get_running_loop().create_future()
        part = self._rank.of_step(run)

        def enqueue() -> None:
            try:
                self._waiter.watch(part(), done)
            except BaseException as error:
                self._waiter.give_up(done, error)

        self._rank.enqueue(enqueue)
        return CudaEvent(done)
