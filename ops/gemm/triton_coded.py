"""Linear layers on weights in codes and scales, in Triton: any number of rows, any shape that few_rows_coded.cu has no instance of.

A tile of the weight becomes numbers of x's dtype in registers, or meets an x that was rounded to the same codes (`round_rows`);
the sum over a group of columns is in float32 and meets the scales there. The weight is the left side of each product: on Hopper
that one may come out of registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.triton_activation import activated
from ops.gemm.dequantize import MAX_FP8
from ops.launch import overlap, wait_for_previous
from ops.stored import FP8, W4, WeightFormat

_MAX_LANES, _MAX_LANES_OF_ROW = 4096, 16384  # the second where a row is read once


@triton.jit
def numbers(codes, KIND: tl.constexpr, dtype: tl.constexpr):
    if KIND == "fp8":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    return codes.to(tl.int8, bitcast=True).to(dtype)


@triton.jit
def _add(total, weight, x, scale, x_scale_at, group, num_rows, ROUNDED: tl.constexpr, PRECISION: tl.constexpr):
    # total [COLUMNS, ROWS] += weight [COLUMNS, DEPTH] x [ROWS, DEPTH]^T, times the scales of both.
    if ROUNDED:
        part = tl.dot(weight, tl.trans(x)).to(tl.float32)
        x_scale = tl.load(x_scale_at + group * num_rows)
        return total + part * scale[:, None] * x_scale[None, :]
    return total + tl.dot(weight, tl.trans(x), input_precision=PRECISION) * scale[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ROUNDED: tl.constexpr, X_GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # x [num_rows, IN], weight [OUT, IN] bytes or for w4 [OUT, IN / 2 of whole chunks], scale [GROUPS, OUT] -> out [num_rows, OUT].
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, in_out = row < num_rows, column < OUT
    at_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    at_column = tl.minimum(column, OUT - 1).to(tl.int64)
    GROUP: tl.constexpr = IN // GROUPS
    X_GROUP: tl.constexpr = IN // X_GROUPS
    wait_for_previous(PDL)
    x_scale_at = x_scale_ptr + at_row
    x_at = x_ptr + at_row[:, None] * IN
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if KIND == "w4":
        CHUNKS: tl.constexpr = (IN + 127) // 128
        weight_at = weight_ptr + at_column[:, None] * (CHUNKS * 64)
        for step in range(CHUNKS * (64 // DEPTH)):
            first = step // (64 // DEPTH) * 128 + step % (64 // DEPTH) * DEPTH
            codes = tl.load(weight_at + step * DEPTH + depth[None, :])
            for half in tl.static_range(2):
                begin = first + half * 64
                group = tl.minimum(begin // GROUP, GROUPS - 1)
                word = tl.load(scale_ptr + group * OUT + at_column)
                zero = (word & 15).to(tl.float32)
                scale = (word & -256).to(tl.float32, bitcast=True)
                code = (codes >> 4 if half else codes & 15).to(tl.float32) - zero[:, None]
                if IN % 128 == 0:
                    x = tl.load(x_at + begin + depth[None, :])
                else:
                    x = tl.load(x_at + begin + depth[None, :], mask=(begin + depth < IN)[None, :], other=0.0)
                total = _add(
                    total, code.to(x_ptr.dtype.element_ty), x, scale, x_scale_at, group, num_rows, False, PRECISION
                )
    else:
        weight_at = weight_ptr + at_column[:, None] * IN
        for begin in range(0, IN, DEPTH):
            group = begin // GROUP
            scale = tl.load(scale_ptr + group * OUT + at_column)
            if IN % DEPTH == 0:
                codes = tl.load(weight_at + begin + depth[None, :])
                x = tl.load(x_at + begin + depth[None, :])
            else:
                inside = (begin + depth < IN)[None, :]
                codes = tl.load(weight_at + begin + depth[None, :], mask=inside, other=0)
                x = tl.load(x_at + begin + depth[None, :], mask=inside, other=0)
            if ROUNDED:
                if KIND == "fp8":
                    weight = codes.to(tl.float8e4nv, bitcast=True)
                    x = x.to(tl.float8e4nv, bitcast=True)
                else:
                    weight = codes.to(tl.int8, bitcast=True)
                    x = x.to(tl.int8, bitcast=True)
            else:
                weight = numbers(codes, KIND, x_ptr.dtype.element_ty)
            total = _add(total, weight, x, scale, x_scale_at, begin // X_GROUP, num_rows, ROUNDED, PRECISION)
    if BIASED:
        total += tl.load(bias_ptr + at_column).to(tl.float32)[:, None]
    out_at = out_ptr + at_row[None, :] * OUT + column[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & in_out[:, None])


def linear(
    x: Tensor, codes: WeightFormat, weight: Tensor, scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    x_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] -> [M, N]. weight [N, bytes] uint8 and scales [groups, N], as coded.py lays them, groups of whole times 16 columns.
    `x_scales`: x [M, K] uint8 is codes too, of the same kind, with these [groups of x, M]."""
    (num_rows, in_features), (groups, out_features) = x.shape, scales.shape
    out = torch.empty((num_rows, out_features), dtype=out_dtype, device=x.device)
    if not num_rows:
        return out
    rounded = x_scales is not None
    x_groups = 1 if x_scales is None else x_scales.shape[0]
    rows, columns, depth, warps, stages = tile(num_rows, codes, rounded)
    if codes == W4 or groups > 1 or x_groups > 1:
        depth = min(depth, in_features // max(groups, x_groups), 64 if codes == W4 else depth)
        depth &= -depth  # the largest power of two that every group has whole
    _linear[(triton.cdiv(num_rows, rows), triton.cdiv(out_features, columns))](
        x.contiguous(), scales if x_scales is None else x_scales, weight, scales, scales if bias is None else bias, out, num_rows,
        IN=in_features, OUT=out_features, GROUPS=groups, KIND=codes.name, ROUNDED=rounded, X_GROUPS=x_groups, ROWS=rows,
        COLUMNS=columns, DEPTH=depth, BIASED=bias is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages, **overlap(x.device),
    )  # fmt: skip
    return out


def tile(num_rows: int, codes: WeightFormat, rounded: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a program, warps and stages."""
    if num_rows <= 16:
        return 16, 32, 128, 4, 4
    if num_rows <= 64:
        return (32 if num_rows <= 32 else 64), 64, 128, 4, 4
    if num_rows <= 128:
        return 128, 64, 128, 4, 3
    return (128, 128, 128, 8, 4) if rounded else (256, 64, 64, 8, 3)


@triton.jit
def _taken(at, inside, IN: tl.constexpr, GATED: tl.constexpr):
    # What is to be rounded, in float32. GATED: silu of it times what lies IN further on, as who writes that would have rounded it.
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        x = activated(x, "silu") * tl.load(at + IN, mask=inside, other=0.0).to(tl.float32)
        x = x.to(at.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _round(x_ptr, out_ptr, scale_ptr, IN: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr,
           GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    # One program a row, at once if LANES are as many, else in two passes; x [rows, IN], of GATED [rows, 2 * IN]; scales [rows].
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    x_at = x_ptr + row * (2 * IN if GATED else IN)
    wait_for_previous(PDL)
    if IN <= LANES:
        x = _taken(x_at + lane, lane < IN, IN, GATED)
        largest = tl.max(tl.abs(x), 0)
        scale = tl.where(largest > 0.0, largest, 1.0) / MOST
        tl.store(out_ptr + row * IN + lane, rounded_to(x / scale, MOST, KIND), mask=lane < IN)
    else:
        largest = 0.0
        for begin in range(0, IN, LANES):
            x = _taken(x_at + begin + lane, begin + lane < IN, IN, GATED)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        scale = tl.where(largest > 0.0, largest, 1.0) / MOST
        for begin in range(0, IN, LANES):
            x = _taken(x_at + begin + lane, begin + lane < IN, IN, GATED) / scale
            tl.store(out_ptr + row * IN + begin + lane, rounded_to(x, MOST, KIND), mask=begin + lane < IN)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _round_groups(x_ptr, out_ptr, scale_ptr, stride, IN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
                  LANES: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    # One program GROUPS groups of a row, each of LANES lanes at least as many as columns; scales [groups, stride].
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, LANES)
    at = group[:, None] * GROUP + lane[None, :]
    inside = (group < IN // GROUP)[:, None] & (lane < GROUP)[None, :]
    wait_for_previous(PDL)
    x = _taken(x_ptr + row * (2 * IN if GATED else IN) + at, inside, IN, GATED)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0.0, largest, 1.0) / MOST
    tl.store(scale_ptr + group * stride + row, scale, mask=group < IN // GROUP)
    tl.store(out_ptr + row * IN + at, rounded_to(x / scale[:, None], MOST, KIND), mask=inside)


@triton.jit
def rounded_to(x, MOST: tl.constexpr, KIND: tl.constexpr):
    x = tl.minimum(tl.maximum(x, -MOST), MOST)
    if KIND == "fp8":
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = tl.floor(x + 0.5).to(tl.int8).to(tl.uint8, bitcast=True)
    return codes


def scales_of_rows(num_rows: int, groups: int, slack: int, device: torch.device) -> Tensor:
    """Room for scales [groups, rows] float32; see `round_rows`."""
    stride = num_rows + (-num_rows % 4 if slack else 0)
    room = torch.empty(groups * stride + slack, dtype=torch.float32, device=device)
    return room[: groups * stride].view(groups, stride)[:, :num_rows]


def round_rows(
    x: Tensor, codes: WeightFormat, groups: int = 1, slack: int = 0, *, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] uint8 and scales [groups, M] float32: a group's largest becomes the largest code. `slack`: so many
    scales may be read behind the last; the rows of scales then begin at multiples of 4. `gated`: x [M, 2 * K] is gates and ups,
    and silu of the one times the other is rounded."""
    num_rows, in_features = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty((num_rows, in_features), dtype=torch.uint8, device=x.device)
    scales = scales_of_rows(num_rows, groups, slack, x.device)
    group = in_features // groups
    lanes = triton.next_power_of_2(group)
    how = {"MOST": MAX_FP8 if codes == FP8 else 127.0, "KIND": codes.name, "GATED": gated, **overlap(x.device)}
    if not num_rows:
        return out, scales
    if groups == 1:
        lanes = lanes if lanes <= _MAX_LANES_OF_ROW else _MAX_LANES
        warps = min(16 if lanes > 8192 else 8, max(1, lanes // 512))
        _round[(num_rows,)](x.contiguous(), out, scales, IN=in_features, LANES=lanes, num_warps=warps, **how)
        return out, scales
    together = max(1, min(_MAX_LANES // lanes, triton.next_power_of_2(groups)))
    _round_groups[(num_rows, triton.cdiv(groups, together))](
        x.contiguous(), out, scales, scales.stride(0), IN=in_features, GROUP=group, GROUPS=together, LANES=lanes,
        num_warps=min(8, max(1, together * lanes // 512)), **how,
    )  # fmt: skip
    return out, scales
