"""What Triton kernels of recurrent layers have in common: which tokens are a line's, how exact products are, a softplus.

Everything about the step is read on the device, so that captured graphs serve any step of their size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning

EXACT = "tf32x3"


@triton.jit
def line_span(slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, line):
    # -> its slot (below 0: none), its first token and the one behind its last, whether its sequence began before.
    slot = tl.load(slot_mapping_ptr + line)
    start = tl.load(query_start_loc_ptr + line)
    end = tl.load(query_start_loc_ptr + line + 1)
    return slot, start, end, tl.load(seq_lens_ptr + line) > end - start


@triton.jit
def softplus(x):
    # log(1 + e) loses e's digits where e is small; log(u) * e / (u - 1) has them (Kahan).
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


def precision(x: Tensor) -> str:
    """Of products of matrices, by what those were made of: float32 numbers by three products each, which lose next to nothing."""
    return EXACT if x.dtype == torch.float32 else "tf32"


def chunk_size(x: Tensor) -> int:
    """Tokens multiplied at once."""
    by = tuning.of(x.device).recurrent
    return by.float32_chunk if x.dtype == torch.float32 else by.chunk


def lanes(size: int) -> int:
    """Of a side of a matrix that is multiplied."""
    return max(16, triton.next_power_of_2(size))
