"""Background threads: how work beside the event loop gets out of the way of what streams wait for.

On a machine with few cores the threads of a step and those of texts and grammars want the same ones, and a step is as slow as the
slowest of its threads: with equal rights two megabytes of text make every token wait. So such threads tell the system that others
come first. They go on as fast as ever where a core is free, and get about a tenth of one where none is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

NICENESS = 10  # about a tenth of what a thread of usual priority gets where both want the same core
TURNS_A_STEP = (
    10  # times that a step on a CPU, and the loop with its tokens, let go of the interpreter and want it back
)
# So long a thread that wants the interpreter waits for one that computes in it, each time; by default fifty times as long. All
# waits of a step are a millisecond then. Two texts side by side lose some per cent.
SWITCH_S = 0.0001


def give_way(niceness: int = NICENESS) -> None:
    """The calling thread has a lower priority from now on. Where the system knows none for a single thread, it keeps its own."""
    if sys.platform == "linux":  # elsewhere this would be said of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def switch_quickly() -> None:
    """From now on the interpreter changes threads often: a token is not to wait for a text several times its own step."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
