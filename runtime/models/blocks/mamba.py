"""Mamba's mixer: a convolution, a selective scan of channels, a gate."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.conv import Convolution
from runtime.models.blocks.norm import NormBlock, RMSNormBlock, build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba


class MambaBlock:
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
        """x [T, H] -> [T, H]; the cache holds the last inputs of the convolution, states of the scan."""
        (inputs, states), state_indices, attn_metadata = step.cache(self._cache_index)
        x, gate = ops.linear(x, self._into).chunk(2, dim=1)
        x = self._conv.forward(x, inputs, state_indices, attn_metadata)
        dt_b_c = list(ops.linear(x, self._x_proj).split_with_sizes(self._sizes, dim=1))
        if self._norms:
            dt_b_c = [norm.forward(each) for norm, each in zip(self._norms, dt_b_c, strict=True)]
        dt = ops.linear(dt_b_c[0].contiguous(), self._dt_proj)
        mixed = ops.selective_scan(
            x, dt, dt_b_c[1], dt_b_c[2], self._a, self._d, gate, states, state_indices, attn_metadata
        )
        return ops.linear(mixed, self._output)


def _norms(mamba: Mamba, norm: RMSNorm, name: str, weights: Weights) -> list[NormBlock]:
    """The norms of what dt is made of, of B and of C."""
    if mamba.norm_weights:
        return [build_norm(norm, f"{name}.{each}_layernorm", weights) for each in ("dt", "b", "c")]
    like = weights.tensors[f"{name}.conv1d.weight"]
    return [RMSNormBlock(like.new_ones(size), norm.eps) for size in (mamba.rank, mamba.state_size, mamba.state_size)]
