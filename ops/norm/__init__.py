"""Norms of a token's features: RMS norm, layer norm (both optionally after adding the residual), and gated RMS norm."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.norm import native, reference, traced

_rms_norm = backends.everywhere(
    "rms_norm", native.rms_norm, "ops.norm.triton_norm:rms_norm", reference.rms_norm, traced.rms_norm
)
_add_rms_norm = backends.everywhere(
    "add_rms_norm",
    native.add_rms_norm,
    "ops.norm.triton_norm:add_rms_norm",
    reference.add_rms_norm,
    traced.add_rms_norm,
)
_layer_norm = backends.everywhere(
    "layer_norm", native.layer_norm, "ops.norm.triton_norm:layer_norm", reference.layer_norm, traced.layer_norm
)
_add_layer_norm = backends.everywhere(
    "add_layer_norm",
    native.add_layer_norm,
    "ops.norm.triton_norm:add_layer_norm",
    reference.add_layer_norm,
    traced.add_layer_norm,
)
_layer_norm_of_sum = backends.everywhere(
    "layer_norm_of_sum",
    native.add_layer_norm,
    "ops.norm.triton_norm:layer_norm_of_sum",
    reference.add_layer_norm,
    traced.add_layer_norm,
)
_gated_rms_norm = backends.on_gpus("gated_rms_norm", "ops.norm.triton_gated:gated_rms_norm", reference.gated_rms_norm)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] / sqrt(mean(x^2) + eps) * weight [H], same shape (Zhang and Sennrich 2019)."""
    return _rms_norm.runs[x.device, x.dtype](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [T, H] to residual [T, H] in place; return rms_norm(residual), [T, H]."""
    return _add_rms_norm.runs[x.device, x.dtype](x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight [H] + bias [H] for x [..., H], same shape (Ba et al. 2016). A
    missing weight counts as ones, a missing bias as zeros."""
    return _layer_norm.runs[x.device, x.dtype](x, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Add x [T, H] to residual [T, H] in place; return layer_norm(residual), [T, H]."""
    return _add_layer_norm.runs[x.device, x.dtype](x, residual, weight, bias, eps)


def layer_norm_of_sum(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return layer_norm(x + y), [T, H]. The sum is not returned, and y may be overwritten."""
    return _layer_norm_of_sum.runs[x.device, x.dtype](x, y, weight, bias, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool) -> Tensor:
    """Return the RMS norm of each group of `group_size` features of x [T, I], times weight [I]. silu(gate [T, I]) multiplies
    x before (`gate_first`) or after. Rows of the gate may be strided."""
    return _gated_rms_norm.runs[x.device, x.dtype](x, gate, weight, eps, group_size, gate_first)
