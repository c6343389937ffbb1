"""Rows of tokens, one for each of their pairs with an expert, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous


@triton.jit
def _gather(
    x_ptr, order_ptr, out_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr
):
    # x [tokens, WIDTH], order [pairs] -> out [pairs, WIDTH].
    place = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    wait_for_previous(PDL)
    token = (tl.load(order_ptr + place) // TOP_K).to(tl.int64)
    row = tl.load(x_ptr + token * WIDTH + lane, mask=lane < WIDTH)
    tl.store(out_ptr + place * WIDTH + lane, row, mask=lane < WIDTH)


def gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """x [T, H] and the pairs by place [T * top_k] int32 (`triton_route.Routed`) -> the row of each pair's token [T * top_k, H]."""
    num_pairs, width = order.shape[0], x.shape[1]
    out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    lanes = min(2048, triton.next_power_of_2(width))
    if num_pairs:
        _gather[(num_pairs, triton.cdiv(width, lanes))](
            x.contiguous(), order, out, TOP_K=top_k, WIDTH=width, LANES=lanes, num_warps=4, **overlap(x.device)
        )
    return out
