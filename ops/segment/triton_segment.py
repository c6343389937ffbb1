"""Means of segments in Triton: one program for a segment and some of its columns, several rows at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous

_LANES, _TILE = 64, 64


@triton.jit
def _mean(x_ptr, starts_ptr, out_ptr, HIDDEN: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    # x [*, HIDDEN], out [segments, HIDDEN] float32.
    segment = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < HIDDEN
    wait_for_previous(PDL)
    start = tl.load(starts_ptr + segment)
    stop = tl.load(starts_ptr + segment + 1)
    total = tl.zeros((LANES,), tl.float32)
    for begin in range(start, stop, TILE):
        row = begin + tl.arange(0, TILE)
        read = (row < stop)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * HIDDEN + lane[None, :], mask=read, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(out_ptr + segment * HIDDEN + lane, total / (stop - start).to(tl.float32), mask=inside)


def segment_mean(x: Tensor, starts: Tensor) -> Tensor:
    x = x.contiguous()
    num, hidden = starts.shape[0] - 1, x.shape[1]
    out = torch.empty((num, hidden), dtype=torch.float32, device=x.device)
    if num:
        _mean[(num, triton.cdiv(hidden, _LANES))](
            x, starts, out, HIDDEN=hidden, LANES=_LANES, TILE=_TILE, num_warps=4, **overlap(x.device)
        )
    return out
