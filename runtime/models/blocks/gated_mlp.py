"""Gated MLP: down(activation(gate(x)) * up(x)), gate and up as one matrix."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.norm import NormBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.mlp import GatedMLP


class GatedMLPBlock:
    def __init__(self, mlp: GatedMLP, layer: str, hidden_size: int, weights: Weights) -> None:
        gate_up, down = mlp.linears(layer, hidden_size)
        self._gate_up, self._down = weights.linears[gate_up.name], weights.linears[down.name]
        self._activation, self._size = mlp.activation.value, mlp.intermediate_size
        self._multipliers = mlp.gate_multiplier, mlp.down_multiplier

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        return self.forward(norm.add_for(self._gate_up, delta, residual), step)

    def forward(self, x: Tensor | ops.RoundedRows, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]."""
        of_gate, of_down = self._multipliers
        if of_gate == 1.0:
            out = ops.gated_mlp(x, self._gate_up, self._down, self._activation)
        else:
            gate_up = ops.linear(x, self._gate_up)
            gate_up[:, : self._size] *= of_gate
            out = ops.linear(ops.gated(gate_up, self._activation), self._down)
        if of_down != 1.0:
            out *= of_down
        return out
