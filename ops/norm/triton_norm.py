"""RMS norm in Triton, one program per token: the row is read once and stays in registers, for any hidden size up to 64 Ki."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    HIDDEN: tl.constexpr, LANES: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x, residual, out [tokens, HIDDEN]; LANES the next power of two. Sums in float32 whatever the dtype.
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    lane = tl.arange(0, LANES)
    inside = lane < HIDDEN
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row + lane, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + lane, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + lane, stored, mask=inside)
        x = stored.to(tl.float32)  # norm what the next layer will read, not what rounding took off it
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(out_ptr + row + lane, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, residual, weight, eps, add=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    hidden = x.shape[-1]
    lanes = triton.next_power_of_2(hidden)
    if x.numel():
        _rms_norm[(x.numel() // hidden,)](
            x, residual, weight, out, eps, HIDDEN=hidden, LANES=lanes, ADD=add,
            num_warps=max(1, min(8, lanes // 512)), **overlap(x.device),
        )  # fmt: skip
    return out
