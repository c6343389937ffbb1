"""RMS and layer norm in Triton, one program per token: the row is read once and stays in registers, for any hidden size up to
64 Ki."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, eps,
    HIDDEN: tl.constexpr, LANES: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, CENTER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # x, residual, out [tokens, HIDDEN]; LANES the next power of two. Sums in float32 whatever the dtype. CENTER: less the mean.
    # ADD: of their sum, which is stored if KEEP.
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    lane = tl.arange(0, LANES)
    inside = lane < HIDDEN
    weight = 1.0
    bias = 0.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row + lane, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + lane, mask=inside, other=0.0).to(tl.float32)
        if KEEP:
            stored = x.to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + row + lane, stored, mask=inside)
            x = stored.to(tl.float32)  # norm the rounded value, which the next layer will read
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / HIDDEN, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    result = x * scale * weight
    if bias_ptr is not None:
        result += bias
    tl.store(out_ptr + row + lane, result.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, x, weight, None, eps, add=False, center=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, residual, weight, None, eps, add=True, center=False)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return _launch(x, x, weight, bias, eps, add=False, center=True)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return _launch(x, residual, weight, bias, eps, add=True, center=True)


def layer_norm_of_sum(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return _launch(x, y, weight, bias, eps, add=True, center=True, keep=False)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, add: bool, center: bool,
    keep: bool = True,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    out = torch.empty_like(x)
    hidden = x.shape[-1]
    lanes = triton.next_power_of_2(hidden)
    if x.numel():
        _norm[(x.numel() // hidden,)](
            x, residual, weight, bias, out, eps, HIDDEN=hidden, LANES=lanes, ADD=add, KEEP=keep, CENTER=center,
            num_warps=max(1, min(8, lanes // 512)), **overlap(x.device),
        )  # fmt: skip
    return out
