"""A poisoned CUDA context is known as such, by its error and by asking the device; a lack of memory is something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

POISONED = """
import asyncio, torch
from runtime.platform.cuda_lane import cuda_fault
from runtime.platform.cuda_lane import EventWaiter

async def main():
    x, waiter = torch.zeros(4, device="cuda"), EventWaiter()
    try:
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print("memory:", cuda_fault(error).value)
    print("before:", cuda_fault(RuntimeError()).value)
    x[torch.tensor([99], device="cuda")]  # a kernel's assertion
    event = torch.cuda.Event(blocking=True)
    event.record()
    try:
        await waiter.after(event).wait()
    except RuntimeError as error:
        print("event:", cuda_fault(error).value)
    print("afterwards:", cuda_fault(RuntimeError()).value)

asyncio.run(main())
"""


def test_a_context_that_a_kernel_poisoned_is_lost_and_one_that_lacked_memory_is_not():
    ran = subprocess.run(
        [sys.executable, "-c", POISONED], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert ran.stdout.splitlines() == ["memory: memory", "before: step", "event: lost", "afterwards: lost"], ran.stderr
