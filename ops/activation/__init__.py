"""Activation functions of an MLP: plain, or gated (the activated first half of a projection times the second half)."""

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
    """Return silu(first half) * second half of gate_up [T, 2 * I], as [T, I]."""
    return _silu_mul.runs[gate_up.device, gate_up.dtype](gate_up)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(first half) * second half of gate_up [T, 2 * I], as [T, I]; `activation` as for `activate`."""
    return _gated.runs[gate_up.device, gate_up.dtype](gate_up, activation)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply an activation to x [T, I]: "silu", "gelu", "gelu_tanh" (tanh approximation), "relu" or "relu2" (relu squared)."""
    return _activate.runs[x.device, x.dtype](x, activation)
