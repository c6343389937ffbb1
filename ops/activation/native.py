"""Activations by oneloop_native, plain and gated."""

from __future__ import annotations

from torch import Tensor

from ops.native import module as native


def silu_mul(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape
    out = gate_up.new_empty(tokens, width // 2)
    native.silu_mul(gate_up, out)
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    tokens, width = gate_up.shape
    out = gate_up.new_empty(tokens, width // 2)
    native.gated(gate_up, activation, out)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    out = x.new_empty(*x.shape)
    native.activate(x, activation, out)
    return out
