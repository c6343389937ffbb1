"""Mixture of experts on weights in codes and scales: the grouped products of triton_grouped.py, of codes that become numbers in
registers; of four bits and fp8 on Hopper those of experts_coded.cu, where it has them.

For Triton codes lie as gemm/coded.py lays those of a linear layer, expert behind expert. The sum over a group of columns is in
float32 and meets the scales there."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.program import missing_for_hopper
from ops.gemm import pieces
from ops.gemm.coded import Stack, in_rows, stacked
from ops.gemm.dequantize import codes_of
from ops.gemm.triton_coded import numbers
from ops.gemm.weight import check_refill, overwrite
from ops.launch import overlap, wait_for_previous
from ops.moe import experts_coded
from ops.moe.coded_experts import CodedGroupedExpertWeights
from ops.moe.triton_grouped import Added, find, load_columns, rows_of, write
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShape, Half
from ops.stored import W4, StoredWeight, WeightFormat, formats_of
from ops.tuning.numbers import ProductTiles

# The tiles are those of 16-bit weights; codes that have become numbers take shared memory beside theirs.
_MAX_COLUMNS, _MANY_ROWS, _MAX_STAGES = 128, 128, 3


class _Kept(NamedTuple):
    """Of all experts: weight [E, out, bytes of a row], scales [E, groups, out], and the order of their columns [E, in], if any.
    `in_pieces`: instead the weight is in the pieces of gemm/pieces.py, scales among them, and `scales` [E, 0, out] empty."""

    codes: WeightFormat
    weight: Tensor
    scales: Tensor
    order: Tensor | None
    groups: int
    in_pieces: bool


class CodedExpertWeights(CodedGroupedExpertWeights):
    """Experts take the groups of the first that is filled in, which those of the others must fit."""

    _weights: dict[Half, _Kept]

    def _fill_weight(self, half: Half, expert: int, parts: tuple[StoredWeight, ...]) -> None:
        formats, current = formats_of(parts), self._weights.get(half)
        if len(formats) != 1 or (current is not None and formats[0] != current.codes):
            kept = "codes of one kind" if current is None else str(current.codes)
            raise ValueError(f"experts in {' and '.join(map(str, formats))} where {kept} are kept")
        stack = stacked(parts, 1 if current is None else current.groups)
        groups = stack.scales.shape[0]
        check_refill("weight", (len(stack.weight), stack.in_features), self.shape.matrix(half))
        in_pieces = self._in_pieces(formats[0], half, stack) if current is None else current.in_pieces
        weight = _pieces(formats[0], stack) if in_pieces else in_rows(stack)
        scales = stack.scales[:0] if in_pieces else stack.scales
        if current is None:
            order = None if stack.order is None else self._room(stack.order)
            current = _Kept(formats[0], self._room(weight), self._room(scales), order, groups, in_pieces)
            self._weights[half] = current
            self.nbytes += sum(each.nbytes for each in (current.weight, current.scales, order) if each is not None)
            self.written = tuple((name, str(kept.codes), kept.groups) for name, kept in self._weights.items())
        if (stack.order is None) != (current.order is None):
            raise ValueError("either all experts have their columns in an order of their own or none")
        if groups != current.groups:
            raise ValueError(f"an expert in {groups} groups of columns where {current.groups} are kept")
        overwrite(current.weight[expert], weight, "weight")
        overwrite(current.scales[expert], scales, "scales")
        overwrite(None if current.order is None else current.order[expert], stack.order, "order")

    def _in_pieces(self, codes: WeightFormat, half: Half, stack: Stack) -> bool:
        if self._dtype == torch.float32 or missing_for_hopper() is not None or stack.order is not None:
            return False
        return experts_coded.fits(codes, self.shape, stack.scales.shape[0], half)

    def product(self, half: Half, x: Tensor, routed: Routed, tiles: ProductTiles, added: Added | None) -> Tensor:
        assert added is None, "adapters do not change experts in codes"
        kept, bias = self._weights[half], self._biases.get(half)
        if not kept.in_pieces:
            return _launch(self.shape, half, kept, bias, x, routed, tiles)
        experts_coded.compile_ahead(kept.codes, pieces.groups_of(kept.codes, kept.weight), x.dtype, x.device)
        return experts_coded.experts_coded(kept.codes, self.shape, half, kept.weight, bias, x, routed)


def _pieces(codes: WeightFormat, stack: Stack) -> Tensor:
    return pieces.in_pieces(codes, codes_of(codes, stack.weight), stack.scales)


@triton.jit
def _add(result, x, codes, word, HALF: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):
    # result [ROWS, COLUMNS] += x [ROWS, DEPTH] codes [COLUMNS, DEPTH]^T, with the scales of the columns' group.
    if KIND == "w4":
        code = (codes >> 4 if HALF else codes & 15).to(tl.float32) - (word & 15).to(tl.float32)[:, None]
        scale = (word & -256).to(tl.float32, bitcast=True)
        weight = code.to(x.dtype)
    else:
        scale = word
        weight = numbers(codes, KIND, x.dtype)
    return result + tl.dot(x, tl.trans(weight), input_precision=PRECISION) * scale[None, :]


@triton.jit
def _x_columns(
    x_at, place_at, begin, DEPTH: tl.constexpr, IN: tl.constexpr, ORDERED: tl.constexpr, PADDED: tl.constexpr
):
    # Columns of x beside places begin .. begin + DEPTH of the codes; zeros beside those past IN, of which PADDED codes have some.
    if not ORDERED and not PADDED:
        return load_columns(x_at, begin, DEPTH, IN)
    place = begin + tl.arange(0, DEPTH)
    column = place
    if ORDERED:
        column = tl.load(place_at + place, mask=place < IN, other=0)
    return tl.load(x_at[:, None] + column[None, :], mask=(place < IN)[None, :], other=0)


@triton.jit
def _product(
    x_ptr, weight_ptr, scale_ptr, place_ptr, bias_ptr, order_ptr, starts_ptr, share_ptr, out_ptr, alpha, limit,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FIRST: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # As triton_grouped's; weight [EXPERTS, OUT or 2 * OUT, bytes], scale [EXPERTS, GROUPS, OUT or 2 * OUT].
    BLOCKS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(PDL)
    expert, tile = find(starts_ptr, tl.program_id(0) // BLOCKS, EXPERTS, LANES, ROWS)
    if expert >= EXPERTS:
        return
    place, is_row, pair = rows_of(starts_ptr, order_ptr, expert, tile, ROWS)
    x_at = x_ptr + (pair // TOP_K if FIRST else place.to(tl.int64)) * IN
    ALL: tl.constexpr = 2 * OUT if GATED else OUT
    GROUP: tl.constexpr = IN // GROUPS
    BYTES: tl.constexpr = (IN + 127) // 128 * 64 if CODES == "w4" else IN
    at_column = column if OUT % COLUMNS == 0 else tl.minimum(column, OUT - 1)
    matrix_row = expert.to(tl.int64) * ALL + at_column
    weight_at = weight_ptr + matrix_row * BYTES
    scale_at = scale_ptr + expert.to(tl.int64) * (GROUPS * ALL) + at_column
    place_at = place_ptr + expert.to(tl.int64) * IN
    depth = tl.arange(0, DEPTH)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    if CODES == "w4":
        for step in range(BYTES // DEPTH):
            first = step // (64 // DEPTH) * 128 + step % (64 // DEPTH) * DEPTH
            codes = tl.load(weight_at[:, None] + step * DEPTH + depth[None, :])
            if GATED:
                up_codes = tl.load(weight_at[:, None] + OUT * BYTES + step * DEPTH + depth[None, :])
            for half in tl.static_range(2):
                begin = first + half * 64
                x = _x_columns(x_at, place_at, begin, DEPTH, IN, ORDERED, BYTES * 2 > IN and CODES == "w4")
                word_at = scale_at + tl.minimum(begin // GROUP, GROUPS - 1) * ALL
                result = _add(result, x, codes, tl.load(word_at), half, CODES, PRECISION)
                if GATED:
                    up = _add(up, x, up_codes, tl.load(word_at + OUT), half, CODES, PRECISION)
    else:
        for begin in range(0, IN, DEPTH):
            x = _x_columns(x_at, place_at, begin, DEPTH, IN, ORDERED, BYTES * 2 > IN and CODES == "w4")
            word_at = scale_at + begin // GROUP * ALL
            codes = load_columns(weight_at, begin, DEPTH, IN)
            result = _add(result, x, codes, tl.load(word_at), 0, CODES, PRECISION)
            if GATED:
                up_codes = load_columns(weight_at + OUT * BYTES, begin, DEPTH, IN)
                up = _add(up, x, up_codes, tl.load(word_at + OUT), 0, CODES, PRECISION)
    write(
        result, up, bias_ptr, share_ptr, out_ptr, matrix_row, column, place, pair, is_row, alpha, limit,
        OUT, FIRST, GATED, BIASED, KIND,
    )  # fmt: skip


def _launch(
    shape: ExpertShape, half: Half, kept: _Kept, bias: Tensor | None, x: Tensor, routed: Routed, tiles: ProductTiles
) -> Tensor:
    codes, weight, scales, order, groups, _ = kept
    first, columns = half == "gate_up", min(tiles.columns, _MAX_COLUMNS)
    stages = tiles.stages if tiles.rows < _MANY_ROWS else min(tiles.stages, _MAX_STAGES)
    num_pairs = routed.order.shape[0]
    out_features, in_features = (shape.intermediate_size if first else shape.hidden_size), x.shape[1]
    out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
    max_hit = min(num_pairs, shape.num_experts)
    max_tiles = (num_pairs + max_hit * (tiles.rows - 1)) // tiles.rows
    kind = shape.activation
    alpha, limit = (0.0, 0.0) if isinstance(kind, str) else (kind.alpha, kind.limit)
    depth = min(tiles.depth, 64 if codes == W4 else tiles.depth)
    if groups > 1 or codes == W4:
        depth = min(depth, in_features // groups & -(in_features // groups))  # so that groups have whole ones
    _product[(max_tiles * triton.cdiv(out_features, columns),)](
        x, weight, scales, scales if order is None else order, weight if bias is None else bias, routed.order,
        routed.starts, routed.chosen.weights, out, alpha, limit,
        EXPERTS=shape.num_experts, LANES=triton.next_power_of_2(shape.num_experts), TOP_K=routed.chosen.weights.shape[1],
        IN=in_features, OUT=out_features, GROUPS=groups, CODES=codes.name, ORDERED=order is not None,
        ROWS=tiles.rows, COLUMNS=columns, DEPTH=depth,
        FIRST=first, GATED=first and shape.gated, BIASED=bias is not None,
        KIND=kind if isinstance(kind, str) else "clamped_swiglu", PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=stages, **overlap(x.device),
    )  # fmt: skip
    return out
