"""Common parts of Triton kernels of recurrent layers: tokens of a request, exactness of products, softplus.

Everything about the step is read on the device, so captured graphs serve any step of their size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning

EXACT = "tf32x3"


@triton.jit
def request_span(state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, request):
    # -> its index into the states (below 0: none), its first token and the end, and whether its sequence started earlier.
    state_index = tl.load(state_indices_ptr + request)
    start = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1)
    return state_index, start, end, tl.load(seq_lens_ptr + request) > end - start


@triton.jit
def softplus(x):
    # log(1 + e) loses digits for small e; log(u) * e / (u - 1) does not (Kahan).
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


def precision(x: Tensor) -> str:
    """Return the `input_precision` of tl.dot: for float32 three products each, which lose almost no precision."""
    return EXACT if x.dtype == torch.float32 else "tf32"


def chunk_size(x: Tensor) -> int:
    """Return the number of tokens of a chunk."""
    by = tuning.of(x.device).recurrent
    return by.float32_chunk if x.dtype == torch.float32 else by.chunk


def lanes(size: int) -> int:
    """Return the lanes for a matrix dimension of `size` in tl.dot: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))
