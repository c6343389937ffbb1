"""The server on asyncio's own loop, and which of the loop's callbacks took long: `python -m tests.benches.slow_callbacks OPTIONS`.

At each SIGUSR2 it prints how many callbacks there were, how many took more than a millisecond, and the longest with what stood on
the stack meanwhile; then it begins anew. A callback's time is the CPU time of the loop's thread, which does not depend on what else
the machine does. Beside `python -m loadtests victim --base-url URL` it tells what on the loop held a stream up; what does not show
here is in other threads: the interpreter kept, or the cores."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from asyncio import events
from collections import Counter, defaultdict
from types import FrameType
from typing import Any

import uvloop

LIMIT_S = 0.001
LOOK_S = 0.0004  # between looks at the stack
NUM_SHOWN, MAX_DEPTH = 10, 8


class Callbacks:
    """What has run on the loop whose thread makes this, since the last report."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._running = 0  # the number of the callback that runs; 0 between them
        self._number = 0
        self._num, self._cpu_s = 0, 0.0
        self._slow: list[tuple[float, float, str, list[str]]] = []  # CPU and wall seconds, what it is, stacks
        self._stacks: defaultdict[int, list[str]] = defaultdict(list)
        threading.Thread(target=self._look, name="stacks", daemon=True).start()

    def run(self, handle: Any, run: Any) -> None:
        self._number += 1
        number = self._running = self._number
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        run(handle)
        cpu_s = time.thread_time() - cpu_s
        self._running = 0
        self._num += 1
        self._cpu_s += cpu_s
        stacks = self._stacks.pop(number, [])
        if cpu_s > LIMIT_S:
            name = repr(getattr(handle._callback, "__self__", handle._callback))
            self._slow.append((cpu_s, time.perf_counter() - began_s, name[:120], stacks))

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            number, frame = self._running, sys._current_frames().get(self._thread)
            if number and (stack := _stack(frame)) and number == self._running:
                self._stacks[number].append(stack)

    def report(self, *_: object) -> None:
        slow = sorted(self._slow, key=lambda one: -one[0])
        longest_ms = 1000 * slow[0][0] if slow else 0.0
        print(
            f"{self._num} callbacks, {self._cpu_s:.2f} s of CPU; {len(slow)} over 1 ms, the longest {longest_ms:.1f} ms",
            file=sys.stderr,
        )
        for cpu_s, wall_s, name, stacks in slow[:NUM_SHOWN]:
            print(f"  {1000 * cpu_s:.1f} ms ({1000 * wall_s:.1f} by the clock)  {name}", file=sys.stderr)
            for stack, num in Counter(stacks).most_common(3):
                print(f"    {num} x {stack}", file=sys.stderr)
        self._slow, self._num, self._cpu_s = [], 0, 0.0


def _stack(frame: FrameType | None) -> str:
    """The innermost calls of a callback, the last first."""
    found: list[str] = []
    while frame is not None and frame.f_code is not Callbacks.run.__code__ and len(found) < MAX_DEPTH:
        found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def main() -> int:
    from server.__main__ import main as serve

    callbacks, run = Callbacks(), events.Handle._run
    events.Handle._run = lambda handle: callbacks.run(handle, run)  # type: ignore[method-assign, assignment]
    uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]  # whose callbacks can be seen
    signal.signal(signal.SIGUSR2, callbacks.report)
    return serve()


if __name__ == "__main__":
    sys.exit(main())
