"""Multi-head latent attention in its absorbed form: queries are brought into the space of the cached latents, and what a head
mixes there is brought out of it, so that no key or value of a head is ever made of what is cached (DeepSeek-V2, 2024)."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.norm import build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.attention import LatentAttention


class LatentAttentionBlock:
    def __init__(
        self,
        attention: LatentAttention,
        layer: str,
        hidden_size: int,
        weights: Weights,
        cos_sin: Tensor,
        cache_index: int,
    ) -> None:
        self._cache_index = cache_index
        into_latent, output, *queries = attention.linears(layer, hidden_size)
        self._into_latent, self._output = weights.linears[into_latent.name], weights.linears[output.name]
        self._queries = [weights.linears[linear.name] for linear in queries]
        name, self._rank, self._key_size = f"{layer}.self_attn", attention.rank, attention.key_size
        self._norm = build_norm(attention.norm, f"{name}.kv_a_layernorm", weights)
        self._query_norm = (
            None if attention.query_rank is None else build_norm(attention.norm, f"{name}.q_a_layernorm", weights)
        )

        def by_head(out_of_latent: Tensor) -> Tensor:  # of each, rows of its key, then of its value
            return out_of_latent.view(attention.num_heads, -1, attention.rank)

        size, out_of_latent = attention.key_size, f"{name}.kv_b_proj.weight"
        self._from_queries = weights.derive_heads(out_of_latent, lambda w: by_head(w)[:, :size].transpose(1, 2))
        self._to_values = weights.derive_heads(out_of_latent, lambda w: by_head(w)[:, size:])
        kv_scale, _ = weights.kv_scales.get(layer, (1.0, 1.0))
        self._heads = ops.LatentHeads(attention.num_heads, attention.rank, attention.scale, cos_sin, kv_scale)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]; the T tokens' latents are stored in their slots first."""
        latent = ops.linear(x, self._into_latent)
        latent[:, : self._rank] = self._norm.forward(latent[:, : self._rank])
        queries = self._make_queries(x)
        (latents, _), slot_mapping, attn_metadata = step.cache(self._cache_index)
        mixed = ops.attend_latent(queries, latent, self._heads, step.positions, latents, slot_mapping, attn_metadata)
        return ops.linear(ops.linear_by_head(mixed, self._to_values).reshape(len(x), -1), self._output)

    def _make_queries(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, heads, rank + rotary_dim]: a head's query times its part of the matrix that would make the keys."""
        first, *second = self._queries
        x = ops.linear(x, first)
        if self._query_norm is not None:
            x = ops.linear(self._query_norm.forward(x), second[0])
        heads = x.view(len(x), self._heads.num_heads, -1)
        queries = x.new_empty(len(x), self._heads.num_heads, self._heads.head_size)
        queries[..., : self._rank] = ops.linear_by_head(heads[..., : self._key_size], self._from_queries)
        queries[..., self._rank :] = heads[..., self._key_size :]
        return queries
