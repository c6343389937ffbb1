"""Worker: the one thread on which a CPU computes, so that a forward pass never holds the event loop. In order, like a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from runtime.gpu_event import WorkerEvent

T = TypeVar("T")


class Worker:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oneloop-worker")

    def submit(self, work: Callable[[], None]) -> WorkerEvent:
        """Enqueue and return. Call it on the event loop."""
        return WorkerEvent(asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` for loading and warm-up, which want the result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
