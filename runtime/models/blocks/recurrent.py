"""Recurrent mixers, which keep a state of fixed size for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

import ops
from runtime.models.blocks.norm import NormBlock, RMSNormBlock, build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import GatedDeltaNet, Mamba, Mamba2, ShortConv


class Convolution:
    """Short causal convolution at the start of recurrent mixers. Each channel is convolved separately over the last few tokens.

    `name`: name of the convolution's weights. `silu`: apply SiLU to the output."""

    def __init__(self, name: str, weights: Weights, *, silu: bool) -> None:
        # from [channels, 1, conv_kernel]
        self._weight = weights.derive(f"{name}.weight", lambda weight: weight[:, 0].T.contiguous())
        self._bias = weights.tensors.get(f"{name}.bias")
        self._silu = silu

    def forward(self, x: Tensor, states: Tensor, state_indices: Tensor, attn_metadata: ops.AttentionMeta) -> Tensor:
        """Return the convolution [T, channels], contiguous, of x [T, channels]. Rows of x may be strided."""
        return ops.causal_conv(x, self._weight, self._bias, self._silu, states, state_indices, attn_metadata)


class ShortConvBlock:
    """LFM2's short convolution between two gates. Its state is the last inputs of the convolution."""

    def __init__(self, conv: ShortConv, layer: str, hidden_size: int, weights: Weights, cache_index: int) -> None:
        self._cache_index = cache_index
        into, output = conv.linears(layer, hidden_size)
        self._into, self._output = weights.linears[into.name], weights.linears[output.name]
        self._conv = Convolution(f"{layer}.conv.conv", weights, silu=False)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        (inputs,), state_indices, attn_metadata = step.cache(self._cache_index)
        b, c, x = step.linear(x, self._into).chunk(3, dim=1)
        return step.linear(c * self._conv.forward(b * x, inputs, state_indices, attn_metadata), self._output)


class MambaBlock:
    """Mamba mixer: a convolution, a selective scan of each channel, and a gate."""

    def __init__(self, mamba: Mamba, layer: str, hidden_size: int, weights: Weights, cache_index: int) -> None:
        self._cache_index = cache_index
        linears = mamba.linears(layer, hidden_size)
        self._into, self._output, self._x_proj, self._dt_proj = (weights.linears[linear.name] for linear in linears)
        name = f"{layer}.mamba"
        self._conv = Convolution(f"{name}.conv1d", weights, silu=True)
        self._sizes = [mamba.rank, mamba.state_size, mamba.state_size]
        self._a = weights.derive(f"{name}.A_log", lambda a_log: -a_log.exp())
        self._d = weights.tensors[f"{name}.D"]
        self._norms = [] if mamba.norm is None else _norms(mamba, mamba.norm, name, weights)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        (inputs, states), state_indices, attn_metadata = step.cache(self._cache_index)
        x, gate = step.linear(x, self._into).chunk(2, dim=1)
        x = self._conv.forward(x, inputs, state_indices, attn_metadata)
        dt_b_c = list(step.linear(x, self._x_proj).split_with_sizes(self._sizes, dim=1))
        if self._norms:
            dt_b_c = [norm.forward(each) for norm, each in zip(self._norms, dt_b_c, strict=True)]
        dt = step.linear(dt_b_c[0].contiguous(), self._dt_proj)
        mixed = ops.selective_scan(
            x, dt, dt_b_c[1], dt_b_c[2], self._a, self._d, gate, states, state_indices, attn_metadata
        )
        return step.linear(mixed, self._output)


def _norms(mamba: Mamba, norm: RMSNorm, name: str, weights: Weights) -> list[NormBlock]:
    if mamba.norm_weights:
        return [build_norm(norm, f"{name}.{each}_layernorm", weights) for each in ("dt", "b", "c")]
    like = weights.tensors[f"{name}.conv1d.weight"]
    return [RMSNormBlock(like.new_ones(size), norm.eps) for size in (mamba.rank, mamba.state_size, mamba.state_size)]


class Mamba2Block:
    """Mamba-2 mixer: a convolution, a state space scan of each head, and a gated norm."""

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
        (inputs, states), state_indices, attn_metadata = step.cache(self._cache_index)
        into = step.linear(x, self._into)
        if self._multipliers is not None:
            into *= self._multipliers
        gate, xbc, dt = into.split_with_sizes(self._sizes, dim=1)
        xbc = self._conv.forward(xbc, inputs, state_indices, attn_metadata)
        mixed = ops.state_space_scan(xbc, dt, self._heads, states, state_indices, attn_metadata)
        return step.linear(self._gated(mixed, gate), self._output)

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        if self._norm is None or self._norm_weight is None:
            return mixed * silu(gate)
        return ops.gated_rms_norm(
            mixed, gate, self._norm_weight, self._norm.eps, self._group_size, gate_first=self._gate_first
        )


class GatedDeltaNetBlock:
    """Gated DeltaNet mixer: a convolution, the gated delta rule of each head, a norm of each head, and a gate."""

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
        (inputs, states), state_indices, attn_metadata = step.cache(self._cache_index)
        qkv, gate = step.linear(x, self._into).split_with_sizes(self._sizes, dim=1)
        qkv = self._conv.forward(qkv, inputs, state_indices, attn_metadata)
        mixed = ops.gated_delta_rule(qkv, step.linear(x, self._ba), self._heads, states, state_indices, attn_metadata)
        mixed = ops.gated_rms_norm(mixed, gate, self._norm, self._eps, self._value_size, gate_first=False)
        return step.linear(mixed, self._output)
