"""LFM2's short convolution between two gates: its state is the last few inputs and nothing else."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.conv import Convolution
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.recurrent import ShortConv


class ShortConvBlock:
    def __init__(self, conv: ShortConv, layer: str, hidden_size: int, weights: Weights, cache_index: int) -> None:
        self._cache_index = cache_index
        into, output = conv.linears(layer, hidden_size)
        self._into, self._output = weights.linears[into.name], weights.linears[output.name]
        self._conv = Convolution(f"{layer}.conv.conv", weights, silu=False)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]; the cache holds the last inputs of the convolution."""
        (inputs,), state_indices, attn_metadata = step.cache(self._cache_index)
        b, c, x = ops.linear(x, self._into).chunk(3, dim=1)
        return ops.linear(c * self._conv.forward(b * x, inputs, state_indices, attn_metadata), self._output)
