"""How Triton kernels are launched here: overlapped with the kernel before them where the device can (Hopper and newer).

Under programmatic dependent launch a kernel may start while those before it still run. So it waits before it touches anything
that another kernel writes; only weights, and what earlier steps left, may be read before. Knows nothing of any operation."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Arguments for a launch of a kernel that calls `wait_for_previous(PDL)`; a CUDA device of capability 9 overlaps."""
    if device.type != "cuda" or INTERPRETED or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    # The next kernel may start at once: its own wait is for this one to end, which is after those before.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
