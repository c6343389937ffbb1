"""RMS and layer norm in plain torch: any float dtype, any device. Sums are float32 (float64 for float64 input)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)  # weights may be wider than x


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight, bias = (None if part is None else part.to(wide.dtype) for part in (weight, bias))
    return functional.layer_norm(wide, wide.shape[-1:], weight, bias, eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    residual += x
    return layer_norm(residual, weight, bias, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    values, factors = x.to(wide), functional.silu(gate.to(wide))
    if gate_first:
        values = values * factors
    grouped = values.unflatten(-1, (-1, group_size))
    normed = (grouped * torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)).flatten(-2) * weight
    return (normed if gate_first else normed * factors).to(x.dtype)
