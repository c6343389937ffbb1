"""Cross-attention of decoder tokens to encoder outputs. Keys and values of the outputs are computed and cached once per
sequence."""

from __future__ import annotations

import torch
from torch import Tensor

import ops
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import CrossStep, ForwardStep
from runtime.models.spec.attention import CrossAttention


class CrossAttentionBlock:
    def __init__(
        self, attention: CrossAttention, layer: str, hidden_size: int, weights: Weights, cache_index: int
    ) -> None:
        self._cache_index = cache_index
        self._q, self._kv, self._output = (
            weights.linears[linear.name] for linear in attention.linears(layer, hidden_size)
        )
        self._num_heads, self._head_size = attention.num_heads, attention.head_size
        self._scale = attention.scale

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Return the attention output [T, H] for x [T, H]. If the step contains new encoder outputs, first store their keys and
        values."""
        (keys, values), _, meta = step.cache(self._cache_index)
        if step.cross is not None:
            self._store(step.cross, keys, values, meta)
        q = step.linear(x, self._q).view(len(x), self._num_heads, self._head_size)
        mixed = ops.paged_attention(q, keys, values, meta, self._scale)
        return step.linear(mixed.flatten(1), self._output)

    def _store(self, cross: CrossStep, keys: Tensor, values: Tensor, meta: ops.AttentionMeta) -> None:
        num_outputs, block_size = cross.outputs.shape[1], keys.shape[2]
        entries = meta.block_tables[cross.rows, : -(-num_outputs // block_size)].long()
        places = torch.arange(block_size, device=entries.device)
        slots = (entries[:, :, None] * block_size + places).flatten(1)[:, :num_outputs].flatten()
        kv = ops.linear(cross.outputs.flatten(0, 1), self._kv).view(len(slots), 2, self._num_heads, self._head_size)
        ops.store_kv(kv[:, 0], kv[:, 1], keys, values, slots)
