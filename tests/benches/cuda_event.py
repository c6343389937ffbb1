"""How soon the loop knows that the device is done: a waiting thread against the driver's callback on an eventfd.

`python -m tests.benches.cuda_event` on a machine with a CUDA device and a C compiler. Prints, for kernels of
half a millisecond, the time from their end to the coroutine's next line, and the host's CPU per event."""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import uvloop
from cuda.bindings import driver

from runtime.platform.cuda_lane import EventWaiter

CALLBACK = r"""
#include <stdint.h>
#include <unistd.h>
void signal_fd(void *fd) { uint64_t one = 1; (void)!write((int)(intptr_t)fd, &one, 8); }
"""


class CallbackWaiter:
    """cuLaunchHostFunc on a second stream, which waits for the event: the first one never waits for the host."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "signal.c").write_text(CALLBACK)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "signal.so", folder / "signal.c"], check=True)
        library = ctypes.CDLL(str(folder / "signal.so"))
        self._function = driver.CUhostFn(ctypes.cast(library.signal_fd, ctypes.c_void_p).value)
        self._stream = torch.cuda.Stream()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._pending: list[asyncio.Future[None]] = []
        asyncio.get_running_loop().add_reader(self._fd, self._wake)

    def _wake(self) -> None:
        for _ in range(os.eventfd_read(self._fd)):
            self._pending.pop(0).set_result(None)

    def after(self, event: torch.cuda.Event) -> asyncio.Future[None]:
        self._stream.wait_event(event)
        future = asyncio.get_running_loop().create_future()
        self._pending.append(future)
        driver.cuLaunchHostFunc(self._stream.cuda_stream, self._function, self._fd)
        return future


async def measure(name: str, waiter: EventWaiter | CallbackWaiter) -> None:
    cycles = int(0.5e-3 * 1.7e9)
    late, cpu_before = [], time.process_time()
    for _ in range(500):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        began_s = time.perf_counter()
        done = waiter.after(end)
        await (done.wait() if hasattr(done, "wait") else done)
        woke_s = time.perf_counter()
        late.append((woke_s - began_s) - start.elapsed_time(end) / 1e3)
    cpu_us = (time.process_time() - cpu_before) / len(late) * 1e6
    cuts = statistics.quantiles(late, n=100)
    print(
        f"{name}: p50 {cuts[49] * 1e6:.0f} us, p99 {cuts[98] * 1e6:.0f} us after the end; {cpu_us:.0f} us of CPU an event"
    )


async def main() -> None:
    torch.cuda._sleep(1000)
    for _ in range(2):
        thread = EventWaiter()
        await measure("waiting thread", thread)
        thread.close()
        await measure("driver callback and eventfd", CallbackWaiter())


if __name__ == "__main__":
    uvloop.run(main())
