"""WorkerLane: computes steps on one worker thread, for platforms whose device is the host.

Work passed to `beside` runs on other threads, on cores that steps do not use. Torch's own operators use one thread there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from runtime.fault import Fault, host_fault
from runtime.runner.lane import Launched, Part
from runtime.runner.worker import Worker
from runtime.step import WorkerEvent


class WorkerLane:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._beside: dict[str, Worker] = {}

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        value: Future[Any] = Future()
        part = self._worker.of_step(work)

        def run() -> None:
            try:
                value.set_result(part())
            except BaseException as error:  # panics of libraries are not Exceptions
                value.set_exception(error)  # raised by work that depends on it

        done = WorkerEvent(self._worker.enqueue(run))
        return Part(value.result, lambda: done)

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        values: list[Any] = []
        done = self._worker.submit(lambda: values.append(work()))
        return Launched(lambda: values[0], done, _unknown)

    def beside(self, work: Callable[[], Sequence[Tensor]], name: str = "encoder") -> asyncio.Future[Any]:
        if name not in self._beside:
            self._beside[name] = Worker(f"oneloop-{name}")
        return self._beside[name].enqueue(work)

    def fault_beside(self, error: BaseException) -> Fault:
        return host_fault(error)

    def ids_to_host(self, ids: Tensor) -> Tensor:
        return ids

    def reader(self, read: Callable[[], Any]) -> Callable[[], Any]:
        """Call `read` at once, since this runs on the worker thread. Return a function that returns its result."""
        value = read()
        return lambda: value

    def synchronize(self) -> None:
        pass

    def fault(self, error: BaseException) -> Fault:
        return host_fault(error)

    async def close(self) -> bool:
        ended = await asyncio.gather(*(worker.close() for worker in self._beside.values()))
        return await self._worker.close() and all(ended)

    def stop(self) -> None:
        pass


def _unknown() -> None:
    return None
