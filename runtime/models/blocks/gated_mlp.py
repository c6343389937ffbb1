"""Gated MLP: down(activation(gate(x)) * up(x)), gate and up as one matrix."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.weights import Weights
from runtime.models.spec.mlp import GatedMLP


class GatedMLPBlock:
    def __init__(self, mlp: GatedMLP, layer: str, hidden_size: int, weights: Weights) -> None:
        gate_up, down = mlp.linears(layer, hidden_size)
        self._gate_up, self._down = weights.linears[gate_up.name], weights.linears[down.name]
        self._activation = mlp.activation.value

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return ops.linear(ops.gated_linear(x, self._gate_up, self._activation), self._down)
