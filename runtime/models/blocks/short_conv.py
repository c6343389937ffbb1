"""LFM2's short convolution between two gates: it remembers the last tokens and nothing else."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.attention import LayerMemory
from runtime.models.blocks.conv import Convolution
from runtime.models.blocks.weights import Weights
from runtime.models.spec.recurrent import ShortConv


class ShortConvBlock:
    def __init__(self, conv: ShortConv, layer: str, hidden_size: int, weights: Weights) -> None:
        into, output = conv.linears(layer, hidden_size)
        self._into, self._output = weights.linears[into.name], weights.linears[output.name]
        self._conv = Convolution(f"{layer}.conv.conv", weights, silu=False)

    def forward(
        self, x: Tensor, positions: Tensor, memory: LayerMemory, slots: Tensor, meta: ops.AttentionMeta
    ) -> Tensor:
        """x [T, H] -> [T, H]; `memory`: last inputs of the convolution."""
        (inputs,) = memory.tensors
        b, c, x = ops.linear(x, self._into).chunk(3, dim=1)
        return ops.linear(c * self._conv.forward(b * x, inputs, slots, meta), self._output)
