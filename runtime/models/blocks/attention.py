"""Attention blocks over the paged KV cache, which contains keys and values of each head, or one latent vector per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import ops
from runtime.models.blocks.norm import build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.attention import (
    Attention,
    AttentionTemperature,
    LatentAttention,
    Mask,
    NormScope,
    QKNorm,
    RelativeBias,
)
from runtime.models.spec.norm import LayerNorm, RMSNorm


class AttentionBlock:
    """Grouped-query attention, with optional norms of q and k."""

    def __init__(
        self, attention: Attention, layer: str, hidden_size: int, weights: Weights, cos_sin: Tensor, cache_index: int
    ) -> None:
        self._cache_index = cache_index
        qkv, output = attention.linears(layer, hidden_size)
        self.qkv, self._output = weights.linears[qkv.name], weights.linears[output.name]
        self._clip = attention.clip
        self._query_factors: Tensor | None = None
        if attention.growth is not None:
            self._query_factors = _query_factors(attention.growth, cos_sin.shape[0]).to(cos_sin.device)
        self._query_size = attention.num_heads * attention.head_size
        self._has_gate = attention.output_gate
        self._norm_heads: _HeadNorms | None = None
        norms, norm_eps = None, 0.0
        match attention.qk_norm:
            case QKNorm(RMSNorm(eps, True), NormScope.HEAD):  # the one that `ops.attend` knows
                names = (f"{layer}.self_attn.q_norm.weight", f"{layer}.self_attn.k_norm.weight")
                norms, norm_eps = (weights.tensors[names[0]], weights.tensors[names[1]]), eps
            case QKNorm(RMSNorm(eps, False), NormScope.HEAD):
                ones = torch.ones(attention.head_size, dtype=torch.float32, device=cos_sin.device)
                norms, norm_eps = (ones, ones), eps
            case QKNorm():
                self._norm_heads = _HeadNorms(attention, attention.qk_norm, f"{layer}.self_attn", weights)
        alibi = None
        if attention.alibi is not None:
            alibi = torch.tensor(attention.alibi, dtype=torch.float32, device=cos_sin.device)
        self._heads = ops.AttentionHeads(
            attention.num_heads, attention.num_kv_heads, attention.head_size, attention.scale, cos_sin, norms, norm_eps,
            attention.window, attention.softcap, weights.tensors.get(f"{layer}.self_attn.sinks"), alibi,
            _kernel_mask(attention.mask), _relative_bias(attention.relative_bias, weights, cos_sin.shape[0]),
            weights.kv_scales.get(layer, (1.0, 1.0)),
        )  # fmt: skip

    def forward(self, x: Tensor | ops.RoundedRows, step: ForwardStep) -> Tensor:
        """Store keys and values of x [T, H] in the KV cache, and return the attention output [T, H]."""
        qkv, gate = step.linear(x, self.qkv), None
        if self._has_gate:
            size = self._query_size
            q, gate, kv_rows = qkv.split_with_sizes([size, size, qkv.shape[1] - 2 * size], dim=1)
            qkv = torch.cat([q, kv_rows], dim=1)
        if self._norm_heads is not None:
            self._norm_heads.apply(qkv)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        if self._query_factors is not None:
            qkv[:, : self._query_size] *= self._query_factors[step.positions]
        caches, slot_mapping, attn_metadata = step.cache(self._cache_index)
        heads, positions = self._heads, step.rotated_at
        if step.rope_table is not None:
            heads = replace(heads, cos_sin=step.rope_table)
            positions = torch.arange(len(qkv), device=qkv.device)
        if caches:
            keys, values = caches
            if step.blocks:
                more = slot_mapping, attn_metadata, step.blocks
                mixed = ops.attend_blocks(qkv, heads, positions, keys, values, *more)
            else:
                mixed = ops.attend(qkv, heads, positions, keys, values, slot_mapping, attn_metadata)
        else:  # a layer without memory
            mixed = ops.attend_packed(qkv, heads, positions, attn_metadata)
        return step.linear(mixed if gate is None else mixed * gate.sigmoid(), self._output)


def _kernel_mask(mask: Mask) -> str:
    """Return the mask's name in `ops`. PREFIX_FULL becomes causal, because the step lists the tokens that attend to each other."""
    return Mask.CAUSAL.value if mask is Mask.PREFIX_FULL else mask.value


def _relative_bias(bias: RelativeBias | None, weights: Weights, num_positions: int) -> Tensor | None:
    """Return the bias [Hq, 2 * num_positions - 1] float32 for each distance from query to key; None if the spec has none."""
    if bias is None:
        return None
    half = bias.num_buckets // 2
    exact = half // 2
    distances = torch.arange(1 - num_positions, num_positions)
    far = torch.log(distances.abs().clamp(min=1).float() / exact) / math.log(bias.max_distance / exact)
    shared = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
    buckets = torch.where(distances.abs() < exact, distances.abs(), shared) + half * (distances > 0)
    return weights.derive(f"{bias.name}.weight", lambda table: table[buckets.to(table.device)].T.contiguous())


def _query_factors(growth: AttentionTemperature, num_positions: int) -> Tensor:
    """Return the factor of each position's query [num_positions, 1] float32. It may be applied before or after the rotary
    embedding."""
    periods = (torch.arange(num_positions)[:, None] + growth.offset) // growth.period
    return 1 + growth.beta * torch.log1p(periods.float())


class _HeadNorms:
    """Norms of q and k as a separate operation before `ops.attend`, in place."""

    def __init__(self, attention: Attention, qk_norm: QKNorm, name: str, weights: Weights) -> None:
        self._sizes = [heads * attention.head_size for heads in (attention.num_heads, attention.num_kv_heads)]
        self._norms = [
            _over_heads(qk_norm, f"{name}.{each}", attention.head_size, weights) for each in ("q_norm", "k_norm")
        ]

    def apply(self, qkv: Tensor) -> None:
        """Normalise q and k in place in qkv [T, *], whose columns are q, k and v in this order."""
        start = 0
        for size, norm in zip(self._sizes, self._norms, strict=True):
            part = qkv[:, start : start + size]
            part.copy_(norm(part))
            start += size


def _over_heads(qk_norm: QKNorm, name: str, head_size: int, weights: Weights) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises q or k [T, heads * head_size]."""
    match qk_norm:
        case QKNorm(norm, NormScope.ALL_HEADS):
            return build_norm(norm, name, weights).forward
        case QKNorm(norm, NormScope.HEAD):
            block = build_norm(norm, name, weights)
            return lambda x: block.forward(x.view(len(x), -1, head_size)).flatten(1)
        case QKNorm(LayerNorm(eps, bias=False), NormScope.EACH_HEAD):
            weight = weights.tensors[f"{name}.weight"]
            return lambda x: ops.layer_norm(x.view(len(x), -1, head_size), None, None, eps).flatten(1) * weight
        case QKNorm(norm, over):
            raise NotImplementedError(f"{norm} over {over.value}")


class LatentAttentionBlock:
    """Latent attention in its absorbed form (DeepSeek-V2, 2024). Queries are projected to the space of the cached latents, and
    outputs of heads are projected back. Keys and values of single heads are therefore never computed from the cache."""

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
        """Store latents of x [T, H] in the KV cache, and return the attention output [T, H]."""
        latent = step.linear(x, self._into_latent)
        latent[:, : self._rank] = self._norm.forward(latent[:, : self._rank])
        queries = self._make_queries(x, step)
        (latents, _), slot_mapping, attn_metadata = step.cache(self._cache_index)
        mixed = ops.attend_latent(queries, latent, self._heads, step.positions, latents, slot_mapping, attn_metadata)
        return step.linear(ops.linear_by_head(mixed, self._to_values).reshape(len(x), -1), self._output)

    def _make_queries(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Return queries [T, heads, rank + rotary_dim] for x [T, H]. Each head's query is multiplied by the head's key
        projection."""
        first, *second = self._queries
        x = step.linear(x, first)
        if self._query_norm is not None:
            x = step.linear(self._query_norm.forward(x), second[0])
        heads = x.view(len(x), self._heads.num_heads, -1)
        queries = x.new_empty(len(x), self._heads.num_heads, self._heads.head_size)
        queries[..., : self._rank] = ops.linear_by_head(heads[..., : self._key_size], self._from_queries)
        queries[..., self._rank :] = heads[..., self._key_size :]
        return queries
