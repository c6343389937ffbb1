"""Mixture of experts in Triton: two grouped matrix products over pairs sorted by expert, then a sum over each token's parts.

The grid is an upper bound that follows from the number of pairs alone, and a program finds its expert by counting tiles in
device memory: a captured graph serves any routing, and the host never waits. Few tokens make it a stream of weights, read once
for up to a tile of rows; many make it tensor-core products of large tiles. Accumulation is in float32, and the parts of a token
are added in the order of its ranks: the same bits every time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.triton_activation import activated
from ops.launch import overlap, wait_for_previous
from ops.moe.reference import StackedExpertWeights
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShape, ExpertShares, Half
from ops.tuning.numbers import ProductTiles


@triton.jit
def find(starts_ptr, tile, EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    # starts [EXPERTS + 1]. The expert that has the tile, EXPERTS or more if none has, and how many of its tiles come before it.
    expert = tl.arange(0, LANES)
    inside = expert < EXPERTS
    start = tl.load(starts_ptr + expert, mask=inside, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=inside, other=0)
    upto = tl.cumsum(tl.cdiv(end - start, ROWS), 0)
    return tl.sum((upto <= tile).to(tl.int32), 0), tile - tl.max(tl.where(upto <= tile, upto, 0), 0)


@triton.jit
def rows_of(starts_ptr, order_ptr, expert, tile, ROWS: tl.constexpr):
    # An expert's tile, by row: the place [ROWS] among sorted pairs, whether it is one of the expert's, and the pair. Rows past the
    # end repeat the last one, so that loads need no mask.
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    place = start + tile * ROWS + tl.arange(0, ROWS)
    is_row = place < end
    place = tl.minimum(place, end - 1)
    return place, is_row, tl.load(order_ptr + place).to(tl.int64)


@triton.jit
def load_columns(at, offset, DEPTH: tl.constexpr, IN: tl.constexpr):
    # Columns offset .. offset + DEPTH of rows that begin at `at` [rows]; zeros past IN.
    depth = offset + tl.arange(0, DEPTH)
    if IN % DEPTH == 0:
        return tl.load(at[:, None] + depth[None, :])
    return tl.load(at[:, None] + depth[None, :], mask=(depth < IN)[None, :], other=0)


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def write(
    result, up, bias_ptr, share_ptr, out_ptr, matrix_row, column, place, pair, is_row, alpha, limit,
    OUT: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    # The end of a product: sums [rows, columns], of gates and of ups, with bias, activated by KIND, to the row of the place if
    # FIRST; else times share [pairs], to that of the pair. matrix_row [columns]: rows of all matrices, and of their biases.
    if BIASED:
        result += tl.load(bias_ptr + matrix_row).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + matrix_row + OUT).to(tl.float32)[None, :]
    if FIRST:
        if KIND == "clamped_swiglu":
            result = clamped_swiglu(result, up, alpha, limit)
        else:
            result = activated(result, KIND)
            if GATED:
                result *= up
        out_row = place.to(tl.int64)
    else:
        result = result * tl.load(share_ptr + pair)[:, None]
        out_row = pair
    out_at = out_ptr + out_row[:, None] * OUT + column[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < OUT)[None, :])


@triton.jit
def _add_shares(
    result, h_ptr, b_ptr, slot, place, expert, column, part, stride_slot, stride_expert, num_slots,
    PARTS: tl.constexpr, RANK: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # result [rows, columns] += what adapters expand h [pairs by place, PARTS, RANK] to: those in `slot` [rows], -1 for none.
    rank = tl.arange(0, RANK)
    for number in range(num_slots):
        is_mine = slot == number
        if tl.sum(is_mine.to(tl.int32), 0) > 0:
            h_at = h_ptr + (place.to(tl.int64) * PARTS + part) * RANK
            h = tl.load(h_at[:, None] + rank[None, :], mask=is_mine[:, None], other=0.0)
            b_at = (
                b_ptr
                + number * stride_slot.to(tl.int64)
                + expert * stride_expert.to(tl.int64)
                + (part * OUT + column) * RANK
            )
            b = tl.load(b_at[:, None] + rank[None, :])
            result = tl.dot(h.to(b.dtype), tl.trans(b), result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["stride_slot", "stride_expert", "num_slots"])
def _product(
    x_ptr, weight_ptr, bias_ptr, order_ptr, starts_ptr, share_ptr, out_ptr, alpha, limit,
    tokens_ptr, h_ptr, b_ptr, stride_slot, stride_expert, num_slots, RANK: tl.constexpr,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # FIRST: x [tokens, IN], weight [EXPERTS, OUT, IN] -> out [pairs, OUT], pairs in sorted order, activated by KIND; where GATED,
    # weight [EXPERTS, 2 * OUT, IN].
    # Else: x [pairs, IN] in sorted order, weight [EXPERTS, OUT, IN] -> out [pairs, OUT] in their own order, times share [pairs].
    # RANK: of adapters, which are added where there are any; 0: there are none.
    BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(PDL)
    expert, tile = find(starts_ptr, tl.program_id(0) // BLOCKS, EXPERTS, LANES, ROWS)
    if expert >= EXPERTS:
        return
    place, is_row, pair = rows_of(starts_ptr, order_ptr, expert, tile, ROWS)
    x_at = x_ptr + (pair // TOP_K if FIRST else place.to(tl.int64)) * IN
    HALVES: tl.constexpr = 2 if GATED else 1
    matrix_row = expert.to(tl.int64) * (HALVES * OUT) + (column if OUT % COLUMNS == 0 else tl.minimum(column, OUT - 1))
    weight_at = weight_ptr + matrix_row * IN
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for offset in range(0, IN, DEPTH):
        x = load_columns(x_at, offset, DEPTH, IN)
        weight = load_columns(weight_at, offset, DEPTH, IN)
        if GATED:
            up_weight = load_columns(weight_at + OUT * IN, offset, DEPTH, IN)
            up = tl.dot(x, tl.trans(up_weight), up, input_precision=PRECISION)
        result = tl.dot(x, tl.trans(weight), result, input_precision=PRECISION)
    if RANK > 0:
        slot = tl.load(tokens_ptr + pair // TOP_K, mask=is_row, other=-1)
        inside = tl.minimum(column, OUT - 1)
        result = _add_shares(
            result, h_ptr, b_ptr, slot, place, expert, inside, 0, stride_slot, stride_expert, num_slots,
            HALVES, RANK, OUT, PRECISION,
        )  # fmt: skip
        if GATED:
            up = _add_shares(
                up, h_ptr, b_ptr, slot, place, expert, inside, 1, stride_slot, stride_expert, num_slots,
                HALVES, RANK, OUT, PRECISION,
            )  # fmt: skip
    write(
        result, up, bias_ptr, share_ptr, out_ptr, matrix_row, column, place, pair, is_row, alpha, limit,
        OUT, FIRST, GATED, BIASED, KIND,
    )  # fmt: skip


@triton.jit
def _add_parts(
    parts_ptr, chosen_ptr, plus_ptr, out_ptr, first_expert,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, LANES: tl.constexpr, PLUS: tl.constexpr, HERE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # parts [tokens, TOP_K, HIDDEN] -> out [tokens, HIDDEN], and `plus` [tokens, HIDDEN] if there is one. HERE: only of so many
    # experts, of those chosen [tokens, TOP_K], have parts been written; 0: all have.
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < HIDDEN
    total = tl.zeros((LANES,), tl.float32)
    wait_for_previous(PDL)
    if PLUS:
        total = tl.load(plus_ptr + token * HIDDEN + lane, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(TOP_K):
        at = parts_ptr + (token * TOP_K + rank) * HIDDEN + lane
        if HERE > 0:
            expert = tl.load(chosen_ptr + token * TOP_K + rank) - first_expert
            width = tl.where((expert >= 0) & (expert < HERE), HIDDEN, 0)
            total += tl.load(at, mask=lane < width, other=0.0).to(tl.float32)
        else:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + lane, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts(parts: Tensor, chosen: Tensor, shape: ExpertShape, plus: Tensor | None) -> Tensor:
    """parts [T * top_k, H] and plus [T, H] contiguous -> [T, H]: of the experts `chosen` [T, top_k] int32 those of `shape`."""
    (num_tokens, top_k), hidden = chosen.shape, parts.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=parts.dtype, device=parts.device)
    lanes = min(1024, triton.next_power_of_2(hidden))
    _add_parts[(num_tokens, triton.cdiv(hidden, lanes))](
        parts, chosen, parts if plus is None else plus, out, shape.first, HIDDEN=hidden, TOP_K=top_k, LANES=lanes,
        PLUS=plus is not None, HERE=0 if shape.are_all else shape.num_experts,
        num_warps=4, **overlap(parts.device),
    )  # fmt: skip
    return out


class Added(NamedTuple):
    """What adapters add to a product: h [pairs by place, parts, rank] float32, which `shares` expand."""

    h: Tensor
    shares: ExpertShares


def product(
    experts: StackedExpertWeights,
    half: Half,
    x: Tensor,
    routed: Routed,
    tiles: ProductTiles,
    added: Added | None = None,
) -> Tensor:
    """gate_up: x [T, H] -> [pairs, I] by place, activated; down: x [pairs, I] by place -> [pairs, H] by pair, weighted."""
    shape, weight, bias = experts.shape, experts.weights[half], experts.biases[half]
    first = half == "gate_up"
    num_pairs = routed.order.shape[0]
    out_features = shape.intermediate_size if first else shape.hidden_size
    out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
    max_hit = min(num_pairs, shape.num_experts)
    max_tiles = (num_pairs + max_hit * (tiles.rows - 1)) // tiles.rows
    kind = shape.activation
    alpha, limit = (0.0, 0.0) if isinstance(kind, str) else (kind.alpha, kind.limit)
    shares = (routed.order, x, x, 0, 0, 0, 0)
    if added is not None:
        b, stride = added.shares.b, added.shares.stride
        shares = (added.shares.tokens, added.h, b, b.stride(0), stride // b.itemsize, b.shape[0], b.shape[2])
    _product[(max_tiles * triton.cdiv(out_features, tiles.columns),)](
        x, weight, weight if bias is None else bias, routed.order, routed.starts, routed.chosen.weights, out,
        alpha, limit, *shares,
        EXPERTS=shape.num_experts, LANES=triton.next_power_of_2(shape.num_experts), TOP_K=routed.chosen.weights.shape[1],
        IN=weight.shape[2], OUT=out_features, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, FIRST=first,
        GATED=first and shape.gated, BIASED=bias is not None, KIND=kind if isinstance(kind, str) else "clamped_swiglu",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, **overlap(x.device),
    )  # fmt: skip
    return out
