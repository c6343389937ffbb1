"""How Triton kernels are launched here: overlapped with the kernel before them where the device can (Hopper and newer).

Under programmatic dependent launch a kernel may start while the one before it still runs. So it waits before it touches
anything that another kernel writes; only constants (weights) may be read earlier. Knows nothing of any operation."""

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


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number elsewhere, so that an interpreter does not run idle programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    # Only after its own wait may a kernel let the next one start: what kernels before the previous one wrote is then there.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
