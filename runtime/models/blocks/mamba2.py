"""Mamba-2's mixer: a convolution, a state space scan of heads, a norm with a gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

import ops
from runtime.models.blocks.conv import Convolution
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.recurrent import Mamba2


class Mamba2Block:
    def __init__(self, mamba: Mamba2, layer: str, hidden_size: int, weights: Weights, cache_index: int) -> None:
        self._cache_index = cache_index
        into, output = mamba.linears(layer, hidden_size)
        self._into, self._output = weights.linears[into.name], weights.linears[output.name]
        self._sizes = [mamba.inner_size, mamba.channels, mamba.num_heads]
        self._conv = Convolution(f"{layer}.mamba.conv1d", weights, silu=True)
        a = weights.derive(f"{layer}.mamba.A_log", lambda a_log: -a_log.exp())
        d, dt_bias = (weights.tensors[f"{layer}.mamba.{name}"] for name in ("D", "dt_bias"))
        self._heads = ops.ScanHeads(mamba.num_heads, mamba.head_size, mamba.num_groups, mamba.state_size, a, d, dt_bias)
        self._norm, self._gate_first = mamba.norm, mamba.gate_first
        self._norm_weight = weights.tensors.get(f"{layer}.mamba.norm.weight")
        self._group_size = mamba.inner_size // mamba.num_groups
        self._multipliers: Tensor | None = None
        if mamba.multipliers is not None:
            states = mamba.num_groups * mamba.state_size
            sizes = (mamba.inner_size, mamba.inner_size, states, states, mamba.num_heads)
            each = torch.tensor(mamba.multipliers).repeat_interleave(torch.tensor(sizes))
            self._multipliers = each.to(d.device)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]; the cache holds the last inputs of the convolution, states of the scan."""
        (inputs, states), state_indices, attn_metadata = step.cache(self._cache_index)
        into = ops.linear(x, self._into)
        if self._multipliers is not None:
            into *= self._multipliers
        gate, xbc, dt = into.split_with_sizes(self._sizes, dim=1)
        xbc = self._conv.forward(xbc, inputs, state_indices, attn_metadata)
        mixed = ops.state_space_scan(xbc, dt, self._heads, states, state_indices, attn_metadata)
        return ops.linear(self._gated(mixed, gate), self._output)

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        if self._norm is None or self._norm_weight is None:
            return mixed * silu(gate)
        return ops.gated_rms_norm(
            mixed, gate, self._norm_weight, self._norm.eps, self._group_size, gate_first=self._gate_first
        )
