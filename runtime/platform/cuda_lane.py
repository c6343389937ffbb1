"""Lanes of CUDA devices: enqueue steps on a device's stream, and notify the event loop when they end.

`CudaLane` enqueues on the event loop's thread. `RankLane` enqueues on a thread per rank: kernels of one device wait for those
of another, so a single thread for both could block on a full launch queue. `SideStream` computes in parallel with steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

import torch
from torch import Tensor

from ops.transfer import is_remote, to_host
from runtime.fault import Fault, RowFailed, host_fault
from runtime.runner.lane import Launched, Part
from runtime.runner.rank_worker import RankWorker
from runtime.runner.worker import Worker
from runtime.step import GpuEvent

# cudaError_t values after which "the process must be terminated and relaunched" (CUDA Runtime API, Data types): uncorrectable
# memory errors, broken links, illegal addresses, timeouts, destroyed contexts, assertions, and other fatal errors of kernels.
STICKY_CODES = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})


def cuda_fault(error: BaseException) -> Fault:
    """Return the severity of a step's error. Queries the device without waiting for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return Fault.MEMORY
    if getattr(error, "error_code", None) in STICKY_CODES or _is_poisoned():
        return Fault.LOST
    return host_fault(error)


def _is_poisoned() -> bool:
    """Return True if the CUDA context is unusable. Every CUDA call then fails, so one cheap call is tried."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.mem_get_info()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


class CudaEvent:
    """Event of a CUDA device. The thread of `EventWaiter` completes its future."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    async def wait(self) -> None:
        # Shielded: a cancelled waiter must not cancel the future of other waiters.
        await asyncio.shield(self._future)

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        self._future.add_done_callback(lambda future: call(future.exception()))


class EventWaiter:
    """Thread that waits for CUDA events in order, and completes a future of the event loop for each.

    A driver callback that writes to an eventfd was slower: on an H200 at full clocks, the event loop continued 338 us after the
    device's end, with this thread after 76 us (tests/benches/cuda_event.py, medians). Callbacks are also not called if the
    device fails. May be created on any thread; `after` must be called on the event loop."""

    def __init__(self) -> None:
        self._recorded: SimpleQueue[tuple[torch.cuda.Event, asyncio.Future[None]] | None] = SimpleQueue()
        self._thread = Thread(target=self._wait_in_order, name="oneloop-cuda-events", daemon=True)
        self._thread.start()

    def after(self, event: torch.cuda.Event) -> CudaEvent:
        """Return an awaitable of the recorded `event`. It raises the device's error. If `event` was created with `blocking`,
        the thread sleeps until the event; otherwise it busy-waits."""
        future = asyncio.get_running_loop().create_future()
        self.watch(event, future)
        return CudaEvent(future)

    def watch(self, event: torch.cuda.Event, future: asyncio.Future[None]) -> None:
        """Complete `future` when `event` has passed. Thread-safe."""
        self._recorded.put((event, future))

    def give_up(self, future: asyncio.Future[None], error: BaseException) -> None:
        """Fail `future` with `error`, because its event was not recorded. Thread-safe."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")  # others would end the event loop
        with contextlib.suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(_complete, future, error)

    def close(self) -> None:
        """End the thread. Returns within a second, even if the device hangs."""
        self._recorded.put(None)
        self._thread.join(timeout=1.0)

    @property
    def has_ended(self) -> bool:
        """True if the thread has ended: `close` was called and all events have passed."""
        return not self._thread.is_alive()

    def _wait_in_order(self) -> None:
        while (entry := self._recorded.get()) is not None:
            event, future = entry
            error: Exception | None = None
            try:
                event.synchronize()
            except RuntimeError as failure:
                error = failure
            try:
                future.get_loop().call_soon_threadsafe(_complete, future, error)
            except RuntimeError:  # the loop is closed
                return


def _complete(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # marks the exception as retrieved: a dead engine does not await it


class SideStream:
    """CUDA stream with its own thread, for work in parallel with steps. Create and call it on the event loop."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._worker, self._waiter = Worker(f"oneloop-{name}"), EventWaiter()
        self._stream = torch.cuda.Stream(device) if is_remote(device) else None

    def run(self, work: Callable[[], Sequence[Tensor]]) -> asyncio.Future[Any]:
        """Run `work` in parallel with steps, see `Lane.beside`."""
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._worker.enqueue(partial(self._enqueue, work, ended))
        return ended

    def _enqueue(self, work: Callable[[], Sequence[Tensor]], ended: asyncio.Future[Any]) -> None:
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for tensor in work():
                    if self._stream is not None:  # steps read it, so its memory is freed after they have run
                        tensor.record_stream(torch.cuda.default_stream(self._device))
                event = torch.cuda.Event(blocking=True)
                event.record()
        except BaseException as error:
            self._waiter.give_up(ended, error)
        else:
            self._waiter.watch(event, ended)

    async def close(self) -> bool:
        """Close the stream. Return False if its work has not ended."""
        has_ended = await self._worker.close()
        self._waiter.close()
        return has_ended and self._waiter.has_ended


class CudaLane:
    """Executor of steps (see `Lane`) on one CUDA device. `worker`: the thread that built the engine; `close` ends it."""

    def __init__(
        self, max_num_seqs: int, steps_in_flight: int, device: torch.device, worker: Worker | None = None
    ) -> None:
        self._worker, self._device = worker, device
        self._waiter = EventWaiter()
        self._beside: dict[str, SideStream] = {}
        # One more than the steps in flight, so the ids in the oldest buffer have been read before it is reused.
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
            return self._waiter.after(recorded(blocking=True))  # late, but nothing was enqueued after the step

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        with self._own_device():
            # A step on an idle device is the only one awaited, and a sleeping thread would be woken late. Behind other steps
            # a late wake-up does not matter.
            is_alone = brief and (self._last_end is None or self._last_end.query())
            started = recorded() if behind is None else cast("torch.cuda.Event | None", behind.started)
            value = work()
            ended = recorded(blocking=not is_alone)
        previous, self._last_end = self._last_end, ended

        def idle_before_s() -> float | None:
            return None if previous is None or started is None else previous.elapsed_time(started) / 1e3

        return Launched(lambda: value, self._waiter.after(ended), idle_before_s)

    def beside(self, work: Callable[[], Sequence[Tensor]], name: str = "encoder") -> asyncio.Future[Any]:
        if name not in self._beside:
            self._beside[name] = SideStream(self._device, name)
        return self._beside[name].run(work)

    def fault_beside(self, error: BaseException) -> Fault:
        return CudaLane.fault(self, error)

    def ids_to_host(self, ids: Tensor) -> Tensor:
        host = next(self._host_ids)
        if len(ids) > len(host):  # several ids per row
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
            torch.cuda.empty_cache()  # cached blocks of other sizes may free enough memory
        return fault

    async def close(self) -> bool:
        ended = await asyncio.gather(*(side.close() for side in self._beside.values()))
        self.stop()
        return all(ended) and self._waiter.has_ended and (self._worker is None or await self._worker.close())

    def stop(self) -> None:
        self._waiter.close()


def recorded(*, blocking: bool = False) -> torch.cuda.Event:
    """Record an event after all work that this thread has enqueued, and return it."""
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)
    event.record()
    return event


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
                begun.set_exception(error)  # raised by work that depends on it

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
        """Return STEP for RowFailed, otherwise LOST: other ranks hang in a step that this rank does not compute."""
        return Fault.STEP if isinstance(error, RowFailed) else Fault.LOST

    def _ends(self, run: Callable[[], torch.cuda.Event]) -> GpuEvent:
        """Run `run` on the rank's thread. Return an awaitable of the CUDA event that it records."""
        done = asyncio.get_running_loop().create_future()
        part = self._rank.of_step(run)

        def enqueue() -> None:
            try:
                self._waiter.watch(part(), done)
            except BaseException as error:
                self._waiter.give_up(done, error)

        self._rank.enqueue(enqueue)
        return CudaEvent(done)
