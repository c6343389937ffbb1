"""Layers: how attention and MLP stand on the residual stream, one after the other or side by side.

What a layer adds is handed on unadded, so that the addition is one operation with the norm that follows, be it the next
layer's: `delta`, None before the first layer, belongs to `residual`, which is updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

import ops
from runtime.models.blocks.attention import AttentionBlock, LayerMemory
from runtime.models.blocks.latent_attention import LatentAttentionBlock
from runtime.models.blocks.mlp import build_mlp
from runtime.models.blocks.norm import NoNorm, NormBlock, build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.spec import AnyLayer, Attention, LatentAttention, Layer, ParallelLayer, Rope


class LayerBlock(Protocol):
    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, memory: LayerMemory, slots: Tensor,
        meta: ops.AttentionMeta,
    ) -> Tensor:  # fmt: skip
        """delta and residual [T, H] -> what this layer adds to residual + delta, [T, H], a fresh tensor."""
        ...


class SequentialBlock:
    def __init__(self, layer: Layer, name: str, hidden_size: int, weights: Weights, cos_sin: Tensor) -> None:
        def norms(names: tuple[str, str] | None) -> tuple[NormBlock, NormBlock] | None:
            if names is None:
                return None
            return (
                build_norm(layer.norm, f"{name}.{names[0]}", weights),
                build_norm(layer.norm, f"{name}.{names[1]}", weights),
            )

        before = norms(layer.before)
        self._before_attention, self._before_mlp = (NoNorm(), NoNorm()) if before is None else before
        self._after = norms(layer.after)
        self._multiplier = layer.multiplier
        self._attention = build_attention(layer.attention, name, hidden_size, weights, cos_sin)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, memory: LayerMemory, slots: Tensor,
        meta: ops.AttentionMeta,
    ) -> Tensor:  # fmt: skip
        x = self._before_attention.add(delta, residual)
        x = self._attention.forward(x, positions, memory, slots, meta)
        if self._after is not None:
            x = self._after[0].forward(x)
        if self._multiplier != 1.0:
            x *= self._multiplier
        x = self._before_mlp.add(x, residual)
        x = self._mlp.forward(x)
        if self._after is not None:
            x = self._after[1].forward(x)
        if self._multiplier != 1.0:
            x *= self._multiplier
        return x


class ParallelBlock:
    def __init__(self, layer: ParallelLayer, name: str, hidden_size: int, weights: Weights, cos_sin: Tensor) -> None:
        norms = [build_norm(layer.norm, f"{name}.{each}", weights) for each in layer.norms]
        self._norm = norms[0]
        self._mlp_norm = norms[1] if len(norms) == 2 else None
        self._attention = build_attention(layer.attention, name, hidden_size, weights, cos_sin)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, memory: LayerMemory, slots: Tensor,
        meta: ops.AttentionMeta,
    ) -> Tensor:  # fmt: skip
        x = self._norm.add(delta, residual)
        added = self._attention.forward(x, positions, memory, slots, meta)
        added += self._mlp.forward(x if self._mlp_norm is None else self._mlp_norm.forward(residual))
        return added


def build_attention(
    attention: Attention, layer: str, hidden_size: int, weights: Weights, cos_sin: Tensor
) -> AttentionBlock | LatentAttentionBlock:
    if isinstance(attention, LatentAttention):
        return LatentAttentionBlock(attention, layer, hidden_size, weights, cos_sin)
    return AttentionBlock(attention, layer, hidden_size, weights, cos_sin)


def build_layer(
    layer: AnyLayer, name: str, hidden_size: int, weights: Weights, cos_sin: Mapping[Rope | None, Tensor]
) -> LayerBlock:
    table = cos_sin[layer.attention.rope]
    match layer:
        case Layer():
            return SequentialBlock(layer, name, hidden_size, weights, table)
        case ParallelLayer():
            return ParallelBlock(layer, name, hidden_size, weights, table)
