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
        self._norms = tuple(tensors[norm.name] for norm in attention.norms(layer_name(index)))
        self._norm_eps = spec.norm_eps
        self._cos_sin = cos_sin
        self._heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
        self._num_heads = sum(self._heads)
        self._head_size = attention.head_size
        self._scale = attention.scale

    def forward(self, x: Tensor, positions: Tensor, kv: LayerKV, slots: Tensor, meta: ops.AttentionMeta) -> Tensor:
        """x [T, H] -> [T, H]; the T tokens' keys and values are stored in their slots first."""
        num_tokens = x.shape[0]
        heads = ops.linear(x, self._qkv).view(num_tokens, self._num_heads, self._head_size)
        q, k, v = heads.split_with_sizes(self._heads, dim=1)
        if self._norms:
            q = ops.rms_norm(q, self._norms[0], self._norm_eps)
            k = ops.rms_norm(k, self._norms[1], self._norm_eps)
        ops.rope(q, k, positions, self._cos_sin)
        ops.store_kv(k, v, kv.k, kv.v, slots)
        mixed = ops.paged_attention(q, kv.k, kv.v, meta, self._scale)
        return ops.linear(mixed.view(num_tokens, self._heads[0] * self._head_size), self._output)
