"""Mixture of experts in Triton: two grouped matrix products over pairs sorted by expert, then a sum over each token's parts.

The grid is an upper bound that follows from the number of pairs alone, and a program finds its expert by counting tiles in device
memory: a captured graph serves any routing, and the host never waits. Few tokens make it a stream of weights, read once for up to a
tile of rows; many make it tensor-core products of large tiles. Accumulation is in float32, and the parts of a token are added in
the order of its ranks: the same bits every time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.triton_activation import activated
from ops.gemm.triton_coded import PLAIN, Codes, columns_of, decoded, half_chunks, numbers
from ops.launch import overlap, wait_for_previous
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShape, ExpertShares, Half
from ops.stored import DECODED
from ops.tuning.numbers import ProductTiles


@triton.jit
def find(starts_ptr, tile, EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    # starts [EXPERTS + 1]. Returns the expert of the tile, EXPERTS or more if there is none, and the number of its tiles
    # before it.
    expert = tl.arange(0, LANES)
    inside = expert < EXPERTS
    start = tl.load(starts_ptr + expert, mask=inside, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=inside, other=0)
    upto = tl.cumsum(tl.cdiv(end - start, ROWS), 0)
    return tl.sum((upto <= tile).to(tl.int32), 0), tile - tl.max(tl.where(upto <= tile, upto, 0), 0)


@triton.jit
def rows_of(starts_ptr, order_ptr, expert, tile, ROWS: tl.constexpr):
    # An expert's tile, by row: the position [ROWS] among sorted pairs, whether it belongs to the expert, and the pair.
    # Rows past the end repeat the last one, so that loads need no mask.
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    place = start + tile * ROWS + tl.arange(0, ROWS)
    is_row = place < end
    place = tl.minimum(place, end - 1)
    return place, is_row, tl.load(order_ptr + place).to(tl.int64)


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def write(
    result, up, bias_ptr, share_ptr, out_ptr, matrix_row, column, place, pair, is_row, alpha, limit,
    OUT: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    # The end of a product: sums [rows, columns], of gates and of ups, with bias, activated, to the row of the place if
    # FIRST; else times share [pairs], to that of the pair. matrix_row [columns]: rows of all matrices, and of their
    # biases.
    if BIASED:
        result += tl.load(bias_ptr + matrix_row).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + matrix_row + OUT).to(tl.float32)[None, :]
    if FIRST:
        if ACTIVATION == "clamped_swiglu":
            result = clamped_swiglu(result, up, alpha, limit)
        else:
            result = activated(result, ACTIVATION)
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
    # result [rows, columns] += what adapters expand h [pairs by place, PARTS, RANK] to: those in `slot` [rows], -1 for
    # none.
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


@triton.jit
def _x_columns(
    x_at, place_at, begin, DEPTH: tl.constexpr, IN: tl.constexpr, ORDERED: tl.constexpr, WHOLE: tl.constexpr
):
    # Columns of x for positions begin .. begin + DEPTH of the weight; zeros past IN.
    if ORDERED:
        place = begin + tl.arange(0, DEPTH)
        column = tl.load(place_at + place, mask=place < IN, other=0)
        x = tl.load(x_at[:, None] + column[None, :], mask=(place < IN)[None, :], other=0)
    else:
        x = columns_of(x_at, begin, DEPTH, IN, WHOLE)
    return x


@triton.jit
def _half(weight_at, both, begin, half: tl.constexpr, IN: tl.constexpr, KIND: tl.constexpr):
    # Codes [COLUMNS, 64]: with four bits, half of the codes in `both`.
    if KIND == "q8":
        codes = columns_of(weight_at, begin, 64, IN, False)
    elif half:
        codes = both >> 4
    else:
        codes = both & 15
    return codes


@triton.jit
def _add(
    result, x, codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, STRIDE: tl.constexpr, IN: tl.constexpr,
    GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr, E4M3: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # result [ROWS, COLUMNS] += x [ROWS, DEPTH] times the values of codes [COLUMNS, DEPTH] at positions from begin on.
    if KIND == "fp8" or KIND == "w8" or KIND == "w4":
        group = begin // (IN // GROUPS)
        if KIND == "w4":
            group = tl.minimum(group, GROUPS - 1)
        weight, scale = numbers(codes, tl.load(scale_at + group * STRIDE), KIND, x.dtype)
        result += tl.dot(x, tl.trans(weight), input_precision=PRECISION) * scale[None, :]
    else:
        weight = decoded(
            codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, STRIDE, IN, GROUPS, SUPERS, KIND, MINS, E4M3,
            COLUMNS, 64,
        )  # fmt: skip
        result = tl.dot(x, tl.trans(weight.to(x.dtype)), result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["stride_slot", "stride_expert", "num_slots"])
def _product(
    x_ptr, weight_ptr, table_ptr, scale_ptr, super_scale_ptr, min_ptr, super_min_ptr, place_ptr, bias_ptr, order_ptr, starts_ptr,
    share_ptr, out_ptr, alpha, limit, tokens_ptr, h_ptr, b_ptr, stride_slot, stride_expert, num_slots, RANK: tl.constexpr,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr,
    SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr, E4M3: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # FIRST: x [tokens, IN], weight [EXPERTS, OUT, IN] -> out [pairs, OUT], pairs in sorted order, activated; where
    # GATED, weight [EXPERTS, 2 * OUT, IN]. Else: x [pairs, IN] in sorted order, weight [EXPERTS, OUT, IN] -> out
    # [pairs, OUT] in their own order, times share [pairs]. KIND: "plain" numbers, or codes as of triton_coded.Codes.
    # RANK: of adapters, which are added where there are any; 0: none.
    BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(PDL)
    expert, tile = find(starts_ptr, tl.program_id(0) // BLOCKS, EXPERTS, LANES, ROWS)
    if expert >= EXPERTS:
        return
    place, is_row, pair = rows_of(starts_ptr, order_ptr, expert, tile, ROWS)
    x_at = x_ptr + (pair // TOP_K if FIRST else place.to(tl.int64)) * IN
    HALVES: tl.constexpr = 2 if GATED else 1
    ALL: tl.constexpr = HALVES * OUT
    CHUNKS: tl.constexpr = (IN + 127) // 128
    BYTES: tl.constexpr = IN if KIND == "plain" or KIND == "fp8" or KIND == "w8" or KIND == "q8" else CHUNKS * 64
    STEPS: tl.constexpr = 64 // DEPTH if DEPTH < 64 else 1  # of half a chunk
    at_column = column if OUT % COLUMNS == 0 else tl.minimum(column, OUT - 1)
    matrix = expert.to(tl.int64)
    matrix_row = matrix * ALL + at_column
    weight_at = weight_ptr + matrix_row * BYTES
    of_fine, of_coarse = matrix * (GROUPS * ALL) + at_column, matrix * (SUPERS * ALL) + at_column
    scale_at, min_at = scale_ptr + of_fine, min_ptr + of_fine
    super_scale_at, super_min_at = super_scale_ptr + of_coarse, super_min_ptr + of_coarse
    place_at = place_ptr + matrix * IN
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    if KIND == "plain":
        for begin in range(0, IN, DEPTH):
            x = columns_of(x_at, begin, DEPTH, IN, IN % DEPTH == 0)
            weight = columns_of(weight_at, begin, DEPTH, IN, IN % DEPTH == 0)
            if GATED:
                up_weight = columns_of(weight_at + OUT * IN, begin, DEPTH, IN, IN % DEPTH == 0)
                up = tl.dot(x, tl.trans(up_weight), up, input_precision=PRECISION)
            result = tl.dot(x, tl.trans(weight), result, input_precision=PRECISION)
    elif KIND == "fp8" or KIND == "w8":
        for begin in range(0, IN, DEPTH):
            x = _x_columns(x_at, place_at, begin, DEPTH, IN, ORDERED, IN % DEPTH == 0)
            codes = columns_of(weight_at, begin, DEPTH, IN, IN % DEPTH == 0)
            result = _add(
                result, x, codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, ALL, IN, GROUPS, SUPERS, KIND,
                MINS, E4M3, COLUMNS, PRECISION,
            )  # fmt: skip
            if GATED:
                codes = columns_of(weight_at + OUT * BYTES, begin, DEPTH, IN, IN % DEPTH == 0)
                up = _add(
                    up, x, codes, begin, table_ptr, scale_at + OUT, super_scale_at + OUT, min_at + OUT, super_min_at + OUT, ALL,
                    IN, GROUPS, SUPERS, KIND, MINS, E4M3, COLUMNS, PRECISION,
                )  # fmt: skip
    else:
        for step in range(CHUNKS * STEPS):
            both, up_both = 0, 0
            if KIND != "q8":
                both = half_chunks(weight_at, step, DEPTH, KIND)
                if GATED:
                    up_both = half_chunks(weight_at + OUT * BYTES, step, DEPTH, KIND)
            for half in tl.static_range(2):
                begin = step // STEPS * 128 + step % STEPS * DEPTH + half * 64
                x = _x_columns(x_at, place_at, begin, DEPTH, IN, ORDERED, IN % 128 == 0)
                codes = _half(weight_at, both, begin, half, IN, KIND)
                result = _add(
                    result, x, codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, ALL, IN, GROUPS, SUPERS,
                    KIND, MINS, E4M3, COLUMNS, PRECISION,
                )  # fmt: skip
                if GATED:
                    codes = _half(weight_at + OUT * BYTES, up_both, begin, half, IN, KIND)
                    up = _add(
                        up, x, codes, begin, table_ptr, scale_at + OUT, super_scale_at + OUT, min_at + OUT, super_min_at + OUT,
                        ALL, IN, GROUPS, SUPERS, KIND, MINS, E4M3, COLUMNS, PRECISION,
                    )  # fmt: skip
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
        OUT, FIRST, GATED, BIASED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _add_parts(
    parts_ptr, chosen_ptr, plus_ptr, out_ptr, first_expert,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, LANES: tl.constexpr, PLUS: tl.constexpr, HERE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # parts [tokens, TOP_K, HIDDEN] -> out [tokens, HIDDEN], plus `plus` [tokens, HIDDEN] if given. HERE: number of local
    # experts; only their parts, of those chosen [tokens, TOP_K], were written; 0: all experts are local.
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
    """Return the sum [T, H] of each token's `parts` [T * top_k, H] from experts in `shape`, and of `plus` [T, H]. `chosen` [T,
    top_k] int32: the chosen experts."""
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
    """Addition of adapters to a product: h [pairs by place, parts, rank] float32, which `shares` expand."""

    h: Tensor
    shares: ExpertShares


def plain(weight: Tensor) -> Codes:
    """Return weights [experts, N, K] of plain numbers as matrices for `product`."""
    return Codes(PLAIN, weight.shape[2], weight, weight)


def product(
    shape: ExpertShape, half: Half, codes: Codes, bias: Tensor | None, x: Tensor, routed: Routed, tiles: ProductTiles,
    added: Added | None = None,
) -> Tensor:  # fmt: skip
    """Return one half of the experts for all pairs of token and expert. gate_up: x [T, H] yields activated [pairs, I] in sorted
    order. down: x [pairs, I] in sorted order yields weighted [pairs, H] in the order of pairs."""
    first, num_pairs, columns = half == "gate_up", routed.order.shape[0], _max_columns(codes, tiles)
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
    _product[(max_tiles * triton.cdiv(out_features, columns),)](
        x, *codes.pointers(), codes.scales if codes.order is None else codes.order, out if bias is None else bias, routed.order,
        routed.starts, routed.chosen.weights, out, alpha, limit, *shares,
        EXPERTS=shape.num_experts, LANES=triton.next_power_of_2(shape.num_experts), TOP_K=routed.chosen.weights.shape[1],
        OUT=out_features, **codes.facts(), ORDERED=codes.order is not None, ROWS=tiles.rows, COLUMNS=columns,
        DEPTH=codes.depth(tiles.depth), FIRST=first, GATED=first and shape.gated,
        BIASED=bias is not None, ACTIVATION=kind if isinstance(kind, str) else "clamped_swiglu",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiles.warps, num_stages=_max_stages(codes, tiles),
        **overlap(x.device),
    )  # fmt: skip
    return out


def _max_columns(codes: Codes, tiles: ProductTiles) -> int:
    """Return the columns of a tile: fewer for codes, whose conversion needs registers and shared memory too."""
    most = tiles.columns if codes.kind == PLAIN else 64 if codes.kind in DECODED else 128
    return min(tiles.columns, most)


def _max_stages(codes: Codes, tiles: ProductTiles) -> int:
    takes_room = codes.kind in DECODED or (codes.kind != PLAIN and tiles.rows >= 128)
    return min(tiles.stages, 3) if takes_room else tiles.stages
