"""RMS norm and quantisation to fp8 in one Triton kernel, one program per token, without writing the normed row in 16 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gemm.dequantize import MAX_FP8
from ops.gemm.rounded import RoundedRows
from ops.gemm.triton_round import rounded_to, scales_of_rows
from ops.launch import overlap, wait_for_previous


@triton.jit
def _norm_round(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, stride, eps,
    HIDDEN: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x, residual [rows, HIDDEN] -> codes [rows, HIDDEN] and scales [groups, stride]. LANES and GROUP are powers of two, GROUP is
    # LANES for one scale a row, else columns of a group.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < HIDDEN
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(residual_ptr + row * HIDDEN + lane, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(x_ptr + row * HIDDEN + lane, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * HIDDEN + lane, stored, mask=inside)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = (x * scale * weight).to(residual_ptr.dtype.element_ty).to(tl.float32)  # rounded as if it had been written
    groups = tl.reshape(normed, (LANES // GROUP, GROUP))
    largest = tl.max(tl.abs(groups), 1)
    scales = tl.where(largest > 0.0, largest, 1.0) / MOST
    group = tl.arange(0, LANES // GROUP)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + row * HIDDEN + at, rounded_to(groups / scales[:, None], MOST, "fp8"), mask=at < HIDDEN)
    tl.store(scale_ptr + group * stride + row, scales, mask=group * GROUP < HIDDEN)


def rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, groups: int, slack: int) -> RoundedRows:
    """Add x [T, H], if given, to residual [T, H] in place, and return its RMS norm, rounded as `round_rows` does; see
    `rounded.fits`."""
    num_rows, hidden = residual.shape
    out = torch.empty((num_rows, hidden), dtype=torch.uint8, device=residual.device)
    scales = scales_of_rows(num_rows, groups, slack, residual.device)
    lanes = triton.next_power_of_2(hidden)
    if num_rows:
        _norm_round[(num_rows,)](
            residual if x is None else x.contiguous(), residual, weight, out, scales, scales.stride(0), eps, HIDDEN=hidden,
            LANES=lanes, GROUP=lanes if groups == 1 else hidden // groups, ADD=x is not None, MOST=MAX_FP8,
            num_warps=max(1, min(8, lanes // 512)), **overlap(residual.device),
        )  # fmt: skip
    return RoundedRows(out, scales, residual.dtype)
