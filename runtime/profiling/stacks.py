"""Stacks: samples the Python stack of one thread from another thread, as often as possible.

A sample blocks the sampled thread for some microseconds, because it takes the GIL. Calls shorter than a sampling interval are
missed. A call in two consecutive samples counts as continuous. The interpreter's switch interval is reduced while sampling, so
that short calls are found too. Uses the standard library only."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

PERIOD_S = 0.001
SWITCH_S = 5e-5  # Python's own is 5 ms
MAX_DEPTH = 128


class ObservedCall(NamedTuple):
    """Call that was observed on the stack. Times are those of `time.time_ns`. `depth`: number of calls around it."""

    name: str
    began_ns: int
    ended_ns: int
    depth: int


class StackSampler:
    def __init__(self, thread_id: int, period_s: float = PERIOD_S) -> None:
        """Start to sample the stack of thread `thread_id` (see `threading.get_ident`) every `period_s` seconds."""
        self._thread_id = thread_id
        self._period_s = period_s
        self._samples: list[tuple[int, tuple[str, ...]]] = []
        self._names: dict[object, str] = {}  # names of code objects, cached
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oneloop-stacks", daemon=True)
        self._usual_switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def stop(self) -> list[ObservedCall]:
        """Stop sampling and return the observed calls, outer calls before inner ones that began at the same time."""
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._usual_switch_s)
        return calls(self._samples)

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            frame = sys._current_frames().get(self._thread_id)
            if frame is None:  # the thread has ended
                return
            self._samples.append((time.time_ns(), self._stack(frame)))
            del frame  # the frame would keep its local variables alive

    def _stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the names of the functions on the stack, the outermost first."""
        found: list[str] = []
        while frame is not None and len(found) < MAX_DEPTH:
            code = frame.f_code
            name = self._names.get(code)
            if name is None:
                name = f"{code.co_qualname} ({'/'.join(PurePath(code.co_filename).parts[-2:])}:{code.co_firstlineno})"
                self._names[code] = name
            found.append(name)
            frame = frame.f_back
        return tuple(reversed(found))


def calls(samples: list[tuple[int, tuple[str, ...]]]) -> list[ObservedCall]:
    """Combine `samples` of (time, stack) into calls. A call continues while consecutive stacks begin with the same names."""
    found: list[ObservedCall] = []
    running: list[tuple[str, int]] = []  # call at each depth, with its start
    for at_ns, stack in samples:
        same = 0
        while same < min(len(running), len(stack)) and running[same][0] == stack[same]:
            same += 1
        found += (
            ObservedCall(name, began_ns, at_ns, same + place) for place, (name, began_ns) in enumerate(running[same:])
        )
        running[same:] = [(name, at_ns) for name in stack[same:]]
    if samples:
        last_ns = samples[-1][0]
        found += (ObservedCall(name, began_ns, last_ns, depth) for depth, (name, began_ns) in enumerate(running))
    return sorted(found, key=lambda call: (call.began_ns, call.depth))
