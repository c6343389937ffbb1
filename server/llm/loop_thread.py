"""LoopThread: event loop on its own thread, for callers without an event loop or with a different one.

Coroutines passed to it run only on that thread. If the waiting caller is interrupted (Ctrl-C, cancellation), its coroutine is
cancelled. The thread is a daemon, so it never keeps a process alive. Independent of engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

SIGNAL_CHECK_S = 0.25  # a quarter of a second: Ctrl-C feels at once, and a waiting thread costs nothing
TIDY_LIMIT_S = 5  # for interrupted work to take its requests back


class LoopThread:
    def __init__(self, name: str) -> None:
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise the result of `work`. The calling thread blocks until then, even if it runs an event loop.

        It waits in intervals of `SIGNAL_CHECK_S`, because a Ctrl-C just before a wait for a lock does not end that wait."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        done = threading.Lock()
        done.acquire()
        future.add_done_callback(lambda _: done.release())  # at once where it is done already
        try:
            while not done.acquire(timeout=SIGNAL_CHECK_S):
                pass
            return future.result()
        except BaseException:
            if future.cancel():  # it was still running: this is Ctrl-C
                self._wait_until_tidy()
            raise

    async def iterate(self, source: AsyncGenerator[T, None]) -> AsyncIterator[T]:
        """Iterate over `source` on the background loop, and yield its items on the caller's loop. Leaving the iteration closes
        `source`."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[T | None] = asyncio.Queue()  # None: the end, for better or worse

        def bring(item: T | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
                here.call_soon_threadsafe(arrived.put_nowait, item)

        async def pump() -> None:
            async with contextlib.aclosing(source):
                async for item in source:
                    bring(item)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        future.add_done_callback(lambda _: bring(None))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel running work and end the thread. May be called from any thread, and repeatedly."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stopping.set)
        if not self.is_here():
            self._thread.join()

    def is_here(self) -> bool:
        """Return whether the caller is on the background thread itself. This happens when a garbage collection runs there."""
        return threading.current_thread() is self._thread

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            self._stopping = asyncio.Event()
            self._started.set()
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    def _wait_until_tidy(self) -> None:
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancelled_are_done(), self._loop).result(TIDY_LIMIT_S)


async def _cancelled_are_done() -> None:
    """Wait until cancelled tasks have run their `finally` blocks, which may await."""
    cancelled = [task for task in asyncio.all_tasks() if task.cancelling()]
    if cancelled:
        await asyncio.wait(cancelled)
