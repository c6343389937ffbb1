"""Execution of long work outside the event loop: decoding, rendering and tokenising of long texts.

Short work runs inline, since a thread's round trip costs more. Long work runs on a small pool, in pieces if possible. The pool
serves callers in rotation, one piece at a time, and reserves one thread for shorter work. Its threads have a lower priority than
the engine's steps. At equal priority, 2 MB of text would delay every token on a server with few cores. Waiting work per caller
is limited. Cancelled work is dropped, also between pieces."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from server.http.errors import TooManyRequests

T = TypeVar("T")
Pieces = Generator[None, None, T]  # work that can be left alone at each `yield`

SHORT_CHARS = 2_000  # about half a millisecond of tokenising
LONG_CHARS = 100_000  # whoever has so much may wait for others of the kind
MAX_WAITING = 4096  # far more than the engine lets in, so that it is the one that says 429 to a burst
RETRY_AFTER_S = 1
MAX_ARENAS = 2  # the main one, and one for what goes on beside it; small blocks are kept by thread anyway
_M_ARENA_MAX = -8  # of malloc.h
NICENESS = 10  # a thread gets about a tenth of what one of usual priority gets where both want the same core
TURNS_A_STEP = 10  # times that a step on a CPU, and the loop with its tokens, release the interpreter and want it back
SWITCH_S = 0.0001  # a thread that computes in the interpreter gives it up after this time; Python's default is 5 ms
MAX_TOUCHED_BYTES = 31 << 20  # glibc's heap keeps no larger piece; it would be taken from the system anew
WORTHWHILE_BYTES = 1 << 20
GIVE_BACK_AFTER_S = 1.0  # by when what very long work has left behind is nobody's any more


class GiveBack:
    """Timer that returns free heap memory to the system some time after large work, on a thread. `act`: does so."""

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self._act = act or _trim_heap
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._start)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        self._timer = None
        threading.Thread(target=self._act, name="oneloop-give-back", daemon=True).start()


class Offload:
    """Thread pool that leaves one thread free for shorter work. `max_waiting`: maximum number of waiting jobs per caller, and a
    quarter of the total limit. `give_back`: started after very long work. An Offload belongs to one event loop."""

    def __init__(
        self, threads: int = 2, max_waiting: int = MAX_WAITING, give_back: GiveBack | None = None, name: str = "text"
    ) -> None:
        self._give_back = give_back or GiveBack()
        self._pool = ThreadPoolExecutor(threads, f"oneloop-{name}", give_way)
        self._num_free = threads
        self._num_free_for_long = max(1, threads - 1)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._waiting: OrderedDict[bytes | None, _Waiting] = OrderedDict()  # who is first is next

    async def run(self, num_chars: int, work: Callable[[], T], caller: bytes | None = None) -> T:
        """Return the result of `work()`, run for `caller`. `num_chars`: cost of the work, in characters. Raises TooManyRequests."""
        if num_chars <= SHORT_CHARS:
            return work()
        return await self._wait_for(num_chars, _in_one_piece(work), caller)

    async def run_pieces(self, num_chars: int, work: Pieces[T], caller: bytes | None = None) -> T:
        """Return the result of `work`, run piece by piece for `caller`. `num_chars`: its cost in characters. Raises
        TooManyRequests."""
        if num_chars <= SHORT_CHARS:
            return to_the_end(work)
        return await self._wait_for(num_chars, work, caller)

    def close(self) -> None:
        """Drop work that has not started."""
        self._give_back.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait_for(self, num_chars: int, work: Pieces[T], caller: bytes | None) -> T:
        job = _Job(caller, num_chars > LONG_CHARS, work, asyncio.get_running_loop().create_future())
        waiting = self._waiting.get(job.caller)
        if self._num_waiting >= 4 * self._max_waiting or (waiting is not None and len(waiting) >= self._max_waiting):
            raise TooManyRequests(
                "The server is busy: too much text waits to be processed", retry_after_s=RETRY_AFTER_S
            )
        self._enqueue(job)
        self._start()
        try:
            return cast("T", await job.result)
        finally:
            self._drop(job)
            # What it raised has this frame, and would have itself by way of the job: a circle that keeps a body for minutes.
            del job, work

    def _enqueue(self, job: _Job) -> None:
        self._waiting.setdefault(job.caller, _Waiting()).of(job).append(job)
        self._num_waiting += 1

    def _drop(self, job: _Job) -> None:
        """Remove a finished or cancelled job."""
        waiting = self._waiting.get(job.caller)
        if waiting is None or job not in waiting.of(job):
            return  # its last piece runs, or has run
        waiting.of(job).remove(job)
        self._num_waiting -= 1
        if not waiting:
            del self._waiting[job.caller]

    def _start(self) -> None:
        """Start a piece of waiting work on each free thread."""
        loop = asyncio.get_running_loop()
        while self._num_free and (job := self._next()) is not None:
            self._num_free -= 1
            self._num_free_for_long -= job.is_long
            piece = loop.run_in_executor(self._pool, _piece_of, job.work)
            piece.add_done_callback(partial(self._settle, job))

    def _next(self) -> _Job | None:
        for caller, waiting in self._waiting.items():
            found = waiting.short or (waiting.long if self._num_free_for_long else None)
            if not found:
                continue
            job = found.popleft()
            self._num_waiting -= 1
            del self._waiting[caller]
            if waiting:
                self._waiting[caller] = waiting  # behind all others
            return job
        return None

    def _settle(self, job: _Job, piece: asyncio.Future[tuple[bool, Any]]) -> None:
        self._num_free += 1
        self._num_free_for_long += job.is_long
        if piece.cancelled():  # the pool was closed
            job.result.cancel()
            return
        if job.is_long:
            self._give_back.soon()
        error = piece.exception()
        if job.result.done():
            job.work.close()
        elif error is not None:
            job.result.set_exception(error)
        elif piece.result()[0]:
            job.result.set_result(piece.result()[1])
        else:
            self._enqueue(job)
        self._start()


class _Job:
    __slots__ = ("caller", "is_long", "result", "work")

    def __init__(self, caller: bytes | None, is_long: bool, work: Pieces[Any], result: asyncio.Future[Any]) -> None:
        self.caller = caller
        self.is_long = is_long
        self.work = work
        self.result = result


class _Waiting:
    """Waiting jobs of one caller."""

    __slots__ = ("long", "short")

    def __init__(self) -> None:
        self.short: deque[_Job] = deque()
        self.long: deque[_Job] = deque()

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def of(self, job: _Job) -> deque[_Job]:
        return self.long if job.is_long else self.short


def _trim_heap() -> None:
    """Return free heap memory to the system. Has an effect with glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_arenas(environ: Mapping[str, str] = os.environ) -> None:
    """Make threads share a few arenas of glibc's heap, unless `environ` already sets the number of arenas.

    By default each thread may get its own arena, up to eight per core. A long-lived allocation prevents an arena from releasing
    the freed memory around it. Grammars that were compiled and used on different threads doubled the memory."""
    if "MALLOC_ARENA_MAX" not in environ and "glibc.malloc.arena_max" not in environ.get("GLIBC_TUNABLES", ""):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, MAX_ARENAS)


def to_the_end(work: Pieces[T]) -> T:
    """Run all pieces of `work` on the calling thread, and return the result."""
    while not (step := _piece_of(work))[0]:
        pass
    return cast("T", step[1])


def _piece_of(work: Pieces[T]) -> tuple[bool, T | None]:
    """Run the next piece of `work`. Return whether it was the last piece, and then the result."""
    try:
        next(work)
    except StopIteration as end:
        return True, end.value
    return False, None


def _in_one_piece(work: Callable[[], T]) -> Pieces[T]:
    return work()
    yield


def give_way(niceness: int = NICENESS) -> None:
    """Lower the priority of the calling thread by `niceness`, if the system has priorities per thread."""
    if sys.platform == "linux":  # elsewhere this would be said of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def switch_quickly() -> None:
    """Shorten the interpreter's thread switch interval, so that long texts on threads delay tokens less."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


def touch_heap(num_bytes: int) -> None:
    """Make `num_bytes` of heap memory resident, for the next allocation of the calling thread.

    The system maps fresh pages one by one at the first write: 10 ms for 15 MB, several times as long as the copy. Python code
    that wrote to the pages would hold the GIL. The C calls used here release it."""
    if num_bytes < WORTHWHILE_BYTES:
        return
    num_bytes = min(num_bytes, MAX_TOUCHED_BYTES)
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a system whose library cannot be called so
        libc = ctypes.CDLL(None)
        malloc, free, memset = libc.malloc, libc.free, libc.memset
        malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        free(malloc(num_bytes))  # that a piece of this size was given back tells glibc to keep the next one
        if piece := malloc(num_bytes):
            memset(piece, 0, num_bytes)
            free(piece)
