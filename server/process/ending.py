"""End of the process: exit codes, deadlines, and signals that a blocked event loop would not handle.

A thread in compiled code cannot be interrupted, and Python waits for it at exit. The process is therefore ended without them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

EXIT_DRAINED = 0
EXIT_NOTHING_TO_SERVE = 1
EXIT_BAD_OPTIONS = 2
EXIT_CANNOT_SERVE = 70  # the engine died, or its device: only another process can go on
EXIT_STUCK = 71  # shutdown was requested, but a part hangs

OBEY_LIMIT_S = 1.0  # for the event loop to act on a second signal
SAME_SIGNAL_S = 0.2  # nobody is so quick


def leave_at_once(code: int, why: str) -> None:
    """Kill child processes and exit immediately with `code`, without waiting for threads. `why`: reason, for the log."""
    for child in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):  # a reader that has gone
        print(f"oneloop: {why}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def leave_within(limit_s: float, code: int) -> None:
    """Exit the process with `code` after `limit_s` seconds, without waiting for threads, unless it has ended by then."""
    _timer(limit_s, lambda: os._exit(code))


class SignalCount:
    """Filter of repeated signals. A terminal and a supervisor may both deliver a signal, which then counts once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the filter. `clock`: returns seconds."""
        self.num = 0
        self._clock = clock
        self._first = (0, 0.0)

    def see(self, number: int) -> bool:
        """Return whether signal `number` counts, or only repeats the last signal."""
        now_s = self._clock()
        if self.num and self._first[0] == number and now_s - self._first[1] <= SAME_SIGNAL_S:
            return False
        if not self.num:
            self._first = number, now_s
        self.num += 1
        return True


class SignalWatch:
    """Thread that ends the process after a signal if the event loop does not: `limit_s` seconds after the first signal, and
    OBEY_LIMIT_S after the second.

    Python writes the number of each signal to one file descriptor at once, even if the main thread is busy. Usually the event
    loop owns the descriptor. Here this thread owns it and forwards signals to the loop. Enter the context on the main thread,
    after the loop has set its handlers."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the watch. `clock`: returns seconds, to recognise repeated signals."""
        self._signals = SignalCount(clock)
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._loops_fd = -1
        self._left = False
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        self._loops_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="oneloop-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        for timer in self._timers:
            timer.cancel()
        signal.set_wakeup_fd(self._loops_fd, warn_on_full_buffer=False)
        self._write.close()  # the thread reads the end

    def _watch(self) -> None:
        with self._read:
            while numbers := self._read.recv(64):
                with contextlib.suppress(OSError):  # full, so it will wake anyway; or closed
                    os.write(self._loops_fd, numbers)
                for number in numbers:
                    if number in SIGNALS:
                        self._see(number)

    def _see(self, number: int) -> None:
        if not self._signals.see(number):
            return
        if self._signals.num == 1:
            self._after(
                self._limit_s,
                lambda: leave_at_once(EXIT_STUCK, "the shutdown exceeded its time limit; the process ends now"),
            )
        else:
            turns = threading.Event()  # set by the loop, which handles the signal itself, if it still does anything
            with contextlib.suppress(RuntimeError):  # it has been closed
                self._loop.call_soon_threadsafe(turns.set)
            code, why = 128 + number, "stopped by a second signal"
            self._after(OBEY_LIMIT_S, lambda: None if turns.is_set() else leave_at_once(code, why))

    def _after(self, limit_s: float, act: Callable[[], None]) -> None:
        self._timers.append(_timer(limit_s, lambda: None if self._left else act()))


def _timer(limit_s: float, act: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(limit_s, act)
    timer.daemon = True
    timer.start()
    return timer


def _children() -> list[int]:
    """Return the ids of this process's direct children, on Linux only. On other systems, the terminal signals children itself."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found
