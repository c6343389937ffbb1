"""Gated DeltaNet's mixer: a convolution, the gated delta rule of heads, a norm of each head and a gate."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.conv import Convolution
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.recurrent import GatedDeltaNet


class GatedDeltaNetBlock:
    def __init__(self, net: GatedDeltaNet, layer: str, hidden_size: int, weights: Weights, cache_index: int) -> None:
        self._cache_index = cache_index
        into, output, ba = (weights.linears[linear.name] for linear in net.linears(layer, hidden_size))
        self._into, self._output, self._ba = into, output, ba
        self._sizes = [net.channels, net.inner_size]
        name = f"{layer}.linear_attn"
        self._conv = Convolution(f"{name}.conv1d", weights, silu=True)
        self._heads = ops.DeltaHeads(
            net.num_key_heads, net.num_value_heads, net.key_size, net.value_size,
            weights.derive(f"{name}.A_log", lambda a_log: -a_log.exp()), weights.tensors[f"{name}.dt_bias"],
        )  # fmt: skip
        self._norm = weights.derive(f"{name}.norm.weight", lambda norm: norm.repeat(net.num_value_heads))
        self._eps, self._value_size = net.norm.eps, net.value_size

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]; the cache holds the last inputs of the convolution, states of the heads."""
        (inputs, states), state_indices, attn_metadata = step.cache(self._cache_index)
        qkv, gate = ops.linear(x, self._into).split_with_sizes(self._sizes, dim=1)
        qkv = self._conv.forward(qkv, inputs, state_indices, attn_metadata)
        mixed = ops.gated_delta_rule(qkv, ops.linear(x, self._ba), self._heads, states, state_indices, attn_metadata)
        mixed = ops.gated_rms_norm(mixed, gate, self._norm, self._eps, self._value_size, gate_first=False)
        return ops.linear(mixed, self._output)
