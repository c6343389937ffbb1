"""Attention over the paged KV cache, grouped queries, with optional norms on q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

import ops
from runtime.models.spec import Attention, DecoderSpec, layer_name


class LayerKV(Protocol):
    """Keys and values of one layer, each [num_blocks, num_kv_heads, block_size, head_size]."""

    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...


class AttentionBlock:
    def __init__(
        self,
        spec: DecoderSpec,
        index: int,
        linears: Mapping[str, ops.LinearWeight],
        tensors: Mapping[str, Tensor],
        cos_sin: Tensor,
    ) -> None:
        attention: Attention = spec.layers[index].attention
        qkv, output = attention.linears(layer_name(index), spec.hidden_size)
        self._qkv, self._output = linears[qkv.name], linears[output.name]
        norms = [tensors[norm.name] for norm in attention.norms(layer_name(index))]
        self._heads = ops.AttentionHeads(
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_size,
            attention.scale,
            cos_sin,
            (norms[0], norms[1]) if norms else None,
            spec.norm_eps,
        )

    def forward(self, x: Tensor, positions: Tensor, kv: LayerKV, slots: Tensor, meta: ops.AttentionMeta) -> Tensor:
        """x [T, H] -> [T, H]; the T tokens' keys and values are stored in their slots first."""
        qkv = ops.linear(x, self._qkv)
        return ops.linear(ops.attend(qkv, self._heads, positions, kv.k, kv.v, slots, meta), self._output)
