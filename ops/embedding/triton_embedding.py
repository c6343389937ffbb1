"""Embedding in Triton: one program gathers one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous


@triton.jit
def _embedding(ids_ptr, table_ptr, out_ptr, HIDDEN: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):
    # ids [tokens] int64, table [vocabulary, HIDDEN], out [tokens, HIDDEN].
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < HIDDEN
    tl.store(out_ptr + token * HIDDEN + lane, tl.load(table_ptr + row * HIDDEN + lane, mask=inside), mask=inside)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Return rows `ids` [T] int64 of table [V, H], contiguous, as [T, H]."""
    num_tokens, hidden = ids.shape[0], table.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=table.dtype, device=table.device)
    if num_tokens:
        lanes = triton.next_power_of_2(hidden)
        _embedding[(num_tokens,)](
            ids, table, out, HIDDEN=hidden, LANES=lanes, num_warps=max(1, min(8, lanes // 256)), **overlap(out.device)
        )
    return out
