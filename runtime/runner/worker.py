"""Worker: the single thread on which a CPU computes, so that a forward pass never blocks the event loop. Work runs in order.

An error affects only the work that raised it; the thread continues. If the thread itself ends, waits and later calls raise
WorkerGone, and the engine and the process end. The thread is not restarted, because its work may be half done. It is a daemon
thread, so a hanging step cannot keep the process from exiting."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeVar

from runtime.fault import WorkerGone
from runtime.step import WorkerEvent

T = TypeVar("T")

CLOSE_LIMIT_S = 1.0  # time for the running work to end when the worker is closed


class _Job(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class Worker:
    def __init__(self, name: str = "oneloop-worker") -> None:
        self.num_users = 1
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._untold: deque[_Job] = deque()  # in order of submission; the running job is the first
        self._gone = False
        self._lock = Lock()  # guards against submissions while the thread ends
        self._thread = Thread(target=self._compute, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end)  # a thread inside compiled code must not outlive the interpreter

    def share(self) -> None:
        """Add a user of the worker. The thread ends when the last user closes it. Work of all users runs in submission order."""
        self.num_users += 1

    @property
    def is_busy(self) -> bool:
        """True while work is running or queued, as far as the event loop has been notified."""
        return any(not job.done.done() for job in tuple(self._untold))

    def submit(self, work: Callable[[], None]) -> WorkerEvent:
        """Enqueue the work of a step and return its event. Call it on the event loop. Raises WorkerGone."""
        return WorkerEvent(self.enqueue(self.of_step(work)))

    def of_step(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` wrapped for a step. Subclasses override this; called when part of a step is submitted."""
        return work

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread and return its result. Used for loading and warm-up."""
        result: T = await self.enqueue(work)
        return result

    async def close(self, limit_s: float = CLOSE_LIMIT_S) -> bool:
        """Remove a user. The last one waits until submitted work has run; return False if that takes longer than `limit_s`."""
        self.num_users -= 1
        if self.num_users:
            return True
        atexit.unregister(self._end)
        await asyncio.to_thread(self._end, limit_s)
        return not self._thread.is_alive()

    def _end(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        self._jobs.put(None)
        self._thread.join(limit_s)

    def enqueue(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Enqueue `work` and return a future of its result. Call it on the event loop. Raises WorkerGone."""
        with self._lock:
            if self._gone:
                raise WorkerGone("the worker thread has ended")
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._untold.append(job := _Job(work, done))
            self._jobs.put(job)
        return done

    def _compute(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                result, error = None, None
                try:
                    result = job.work()
                except BaseException as raised:  # panics of libraries and SystemExit are not Exceptions
                    error = raised
                _tell(job, result, error)
                self._untold.popleft()
                del job, result, error  # they hold tensors, and the next job may come late
        finally:
            with self._lock:
                self._gone = True
                for left in self._untold:
                    _tell(left, None, WorkerGone("the worker thread has ended"))
                self._untold.clear()
            self.has_gone()

    def has_gone(self) -> None:
        """Handle the end of the thread, for any reason. Called on the thread; subclasses override it."""


def _tell(job: _Job, result: Any, error: BaseException | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
        job.done.get_loop().call_soon_threadsafe(_complete, job.done, result, error)


def _complete(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
        return
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        # Neither may be raised in a coroutine: one would end the event loop, the other cannot be set on a future.
        error, cause = RuntimeError(f"{type(error).__name__}: {error}"), error
        error.__cause__ = cause
    done.set_exception(error)
    done.exception()  # marks the exception as retrieved: a dead engine does not await it
