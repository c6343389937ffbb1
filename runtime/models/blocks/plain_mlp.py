"""MLP of two matrices: down(activation(up(x)))."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.norm import NormBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.mlp import PlainMLP


class PlainMLPBlock:
    def __init__(self, mlp: PlainMLP, layer: str, hidden_size: int, weights: Weights) -> None:
        up, down = mlp.linears(layer, hidden_size)
        self._up, self._down = weights.linears[up.name], weights.linears[down.name]
        self._activation = mlp.activation.value

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        return self.forward(norm.add(delta, residual), step)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]."""
        return ops.linear(ops.activated_linear(x, self._up, self._activation), self._down)
