"""Hybrid layer: a mixer that reads the output of a shared transformer. Only the mixer's output is added to the residual
(Zamba2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import ops
from runtime.models.blocks.attention import AttentionBlock
from runtime.models.blocks.mixer import MixerBlock
from runtime.models.blocks.mlp import GatedMLPBlock
from runtime.models.blocks.norm import build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.layer import HybridLayer, SharedTransformer


class AdaptedLinear(ops.LinearWeight):
    """Linear layer with Zamba's own adapters, pairs of low-rank matrices. Their concatenated outputs are as wide as that of
    `weight`."""

    def __init__(self, weight: ops.LinearWeight, adapters: Sequence[tuple[ops.LinearWeight, ops.LinearWeight]]) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.nbytes = weight.nbytes + sum(each.nbytes for adapter in adapters for each in adapter)
        self._weight, self._adapters = weight, adapters

    def of(self, adapters: ops.TokenAdapters | None) -> AdaptedLinear:
        if adapters is None:
            return self
        own = [(first.of(adapters), second.of(adapters)) for first, second in self._adapters]
        return AdaptedLinear(self._weight.of(adapters), own)

    def matmul(self, x: Tensor) -> Tensor:
        parts = [ops.linear(ops.linear(x, first), second) for first, second in self._adapters]
        return ops.linear(x, self._weight).add_(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def refill(self, stored: ops.Stored) -> bool:
        raise TypeError("the matrix and its adapters are refilled each by itself")

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a matrix with adapters is no embedding")


class HybridBlock:
    def __init__(
        self, layer: HybridLayer, mixer: MixerBlock, name: str, hidden_size: int, weights: Weights, cos_sin: Tensor,
        attention_cache: int,
    ) -> None:  # fmt: skip
        shared = layer.shared
        adapted = weights._replace(linears=_with_adapters(shared, hidden_size, weights.linears))
        self._both_norm = build_norm(shared.norm, f"{shared.name}.input_layernorm", weights)
        self._attention = AttentionBlock(shared.attention, shared.name, hidden_size, adapted, cos_sin, attention_cache)
        self._mlp_norm = build_norm(shared.norm, f"{shared.name}.pre_ff_layernorm", weights)
        self._mlp = GatedMLPBlock(shared.mlp, shared.name, hidden_size, adapted)
        self._linear = weights.linears[shared.linear(name, hidden_size).name]
        self._norm, self._mixer = build_norm(layer.norm, f"{name}.{layer.before}", weights), mixer

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        if delta is not None:
            residual += delta
        assert step.input_embeds is not None  # what the stack promises where a layer asks for them
        x = self._both_norm.forward(torch.cat([residual, step.input_embeds], dim=1))
        x = self._attention.forward(x, step)
        x = step.linear(self._mlp.forward(self._mlp_norm.forward(x), step), self._linear)
        return self._mixer.forward(self._norm.forward(x.add_(residual)), step)


def _with_adapters(
    shared: SharedTransformer, hidden_size: int, linears: Mapping[str, ops.LinearWeight]
) -> dict[str, ops.LinearWeight]:
    qkv, _, gate_up, _ = shared.shared_linears(hidden_size)
    adapters = {qkv.name: shared.attention_adapters(hidden_size), gate_up.name: (shared.mlp_adapter(hidden_size),)}
    adapted = {
        name: AdaptedLinear(linears[name], [(linears[first.name], linears[second.name]) for first, second in each])
        for name, each in adapters.items()
        if each
    }
    return {**linears, **adapted}
