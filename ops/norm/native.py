"""RMS and layer norm by oneloop_native. Rows of up to three dims, strided in all but the last."""

from __future__ import annotations

from torch import Tensor

from ops.native import module as native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() > 3:
        return rms_norm(x.flatten(0, -3), weight, eps).view(x.shape)
    out = x.new_empty(*x.shape)
    native.rms_norm(x, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = x.new_empty(*x.shape)
    native.add_rms_norm(x, residual, weight, eps, out)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.dim() > 3:
        return layer_norm(x.flatten(0, -3), weight, bias, eps).view(x.shape)
    out = x.new_empty(*x.shape)
    native.layer_norm(x, weight, bias, eps, out)
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out = x.new_empty(*x.shape)
    native.add_layer_norm(x, residual, weight, bias, eps, out)
    return out
