"""Shrinking of experts' inputs by adapters, in Triton: for each pair of a token and an expert, with that expert's part of the
token's adapter. The expansion is added at the end of the expert's own product (triton_grouped.py).

Slots of a tile's tokens are in device memory, so one captured graph serves any mixture: a program iterates over all slots
and skips those that none of its rows has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gemm.triton_coded import columns_of
from ops.launch import overlap, wait_for_previous
from ops.moe.triton_grouped import Added, find
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShares

_ROWS, _DEPTH = 16, 64


@triton.jit(do_not_specialize=["stride_slot", "stride_expert", "stride_scale", "stride_expert_scale", "num_slots"])
def _shrink(
    x_ptr, tokens_ptr, a_ptr, scale_ptr, order_ptr, starts_ptr, h_ptr,
    stride_slot, stride_expert, stride_scale, stride_expert_scale, num_slots,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [tokens, IN] if FIRST, else [pairs, IN] by place -> h [pairs by place, PARTS, RANK] float32, scaled; zeros without adapter.
    part, rank = tl.program_id(1), tl.arange(0, RANK)
    wait_for_previous(PDL)
    expert, tile = find(starts_ptr, tl.program_id(0), EXPERTS, LANES, ROWS)
    if expert >= EXPERTS:
        return
    end = tl.load(starts_ptr + expert + 1)
    place = tl.load(starts_ptr + expert) + tile * ROWS + tl.arange(0, ROWS)
    is_row = place < end
    place = tl.minimum(place, end - 1)
    token = tl.load(order_ptr + place).to(tl.int64) // TOP_K
    slot = tl.load(tokens_ptr + token, mask=is_row, other=-1)
    x_at = x_ptr + (token if FIRST else place.to(tl.int64)) * IN
    result = tl.zeros((ROWS, RANK), tl.float32)
    for number in range(num_slots):
        is_mine = slot == number
        if tl.sum(is_mine.to(tl.int32), 0) > 0:
            scale = tl.load(
                scale_ptr + number * stride_scale.to(tl.int64) + expert * stride_expert_scale.to(tl.int64) + part
            )
            if scale != 0.0:
                a_at = (
                    a_ptr
                    + number * stride_slot.to(tl.int64)
                    + expert * stride_expert.to(tl.int64)
                    + (part * RANK + rank) * IN
                )
                sums = tl.zeros((ROWS, RANK), tl.float32)
                for offset in range(0, IN, DEPTH):
                    x = columns_of(x_at, offset, DEPTH, IN, IN % DEPTH == 0)
                    a = columns_of(a_at, offset, DEPTH, IN, IN % DEPTH == 0)
                    sums = tl.dot(x, tl.trans(a), sums, input_precision=PRECISION)
                result = tl.where(is_mine[:, None], sums * scale, result)
    h_at = h_ptr + (place.to(tl.int64) * PARTS + part) * RANK
    tl.store(h_at[:, None] + rank[None, :], result, mask=is_row[:, None])


def shrunk(shares: ExpertShares, x: Tensor, routed: Routed, *, by_token: bool) -> Added:
    """Shrink x: [T, in] if `by_token`, else [pairs, in] by place; contiguous and of the adapters' dtype."""
    num_slots, num_parts, rank, size = shares.a.shape
    num_pairs, num_experts = routed.order.shape[0], routed.starts.shape[0] - 1
    h = torch.empty(num_pairs, num_parts, rank, dtype=torch.float32, device=x.device)
    max_tiles = (num_pairs + min(num_pairs, num_experts) * (_ROWS - 1)) // _ROWS
    _shrink[(max_tiles, num_parts)](
        x, shares.tokens, shares.a, shares.scale, routed.order, routed.starts, h,
        shares.a.stride(0), shares.stride // shares.a.itemsize, shares.scale.stride(0), shares.stride // 4, num_slots,
        EXPERTS=num_experts, LANES=triton.next_power_of_2(num_experts), TOP_K=routed.chosen.weights.shape[1], IN=size,
        PARTS=num_parts, RANK=rank, ROWS=_ROWS, DEPTH=_DEPTH, FIRST=by_token,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **overlap(x.device),
    )  # fmt: skip
    return Added(h, shares)
