"""Activations in plain torch, plain and gated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def silu_mul(gate_up: Tensor) -> Tensor:
    return gated(gate_up, "silu")


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def activate(x: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x)
