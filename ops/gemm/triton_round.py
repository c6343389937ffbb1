"""Quantisation of activations to eight bits per row or group of columns, in Triton, for products with 8-bit codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.triton_activation import activated
from ops.gemm.dequantize import MAX_FP8
from ops.launch import overlap, wait_for_previous
from ops.stored import FP8, WeightFormat

_MAX_LANES, _MAX_LANES_OF_ROW = 4096, 16384  # the second applies to rows that are read once


@triton.jit
def _taken(at, inside, IN: tl.constexpr, GATED: tl.constexpr):
    # Numbers to quantise, in float32. GATED: silu of them times the numbers IN later, rounded as if written to memory.
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        x = activated(x, "silu") * tl.load(at + IN, mask=inside, other=0.0).to(tl.float32)
        x = x.to(at.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _round(x_ptr, out_ptr, scale_ptr, IN: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr,
           GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    # One program per row, in one pass if LANES cover it, else in two; x [rows, IN], if GATED [rows, 2 * IN]; scales [rows].
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
    # One program per GROUPS groups of a row, each of LANES lanes, at least its columns; scales [groups, stride].
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
    """Allocate scales [groups, rows] float32; see `round_rows`."""
    stride = num_rows + (-num_rows % 4 if slack else 0)
    room = torch.empty(groups * stride + slack, dtype=torch.float32, device=device)
    return room[: groups * stride].view(groups, stride)[:, :num_rows]


def round_rows(
    x: Tensor, codes: WeightFormat, groups: int = 1, slack: int = 0, *, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Round x [M, K] to codes [M, K] uint8 and scales [groups, M] float32; a group's maximum becomes the largest code.
    `slack`: number of readable scales after the last; rows of scales then begin at multiples of 4. `gated`: x [M, 2 * K] is
    gates and ups, and silu(gates) * ups is rounded."""
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
