"""Activations of an MLP: alone, or of one half of a projection times the other half."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.activation import native, reference, traced

_silu_mul = backends.everywhere(
    "silu_mul", native.silu_mul, "ops.activation.triton_activation:silu_mul", reference.silu_mul, traced.silu_mul
)
_gated = backends.everywhere(
    "gated", native.gated, "ops.activation.triton_activation:gated", reference.gated, traced.gated
)
_activate = backends.everywhere(
    "activate", native.activate, "ops.activation.triton_activation:activate", reference.activate, traced.activate
)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I] -> silu(first half) * second half, [T, I]."""
    return _silu_mul.runs[gate_up.device, gate_up.dtype](gate_up)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * I] -> activation(first half) * second half, [T, I]; `activation` as for `activate`."""
    return _gated.runs[gate_up.device, gate_up.dtype](gate_up, activation)


def activate(x: Tensor, activation: str) -> Tensor:
    """x [T, I] -> the same shape: "silu", "gelu", "gelu_tanh" (its approximation), "relu" or "relu2" (relu squared)."""
    return _activate.runs[x.device, x.dtype](x, activation)
