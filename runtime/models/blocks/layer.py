"""Layer blocks: mixer and MLP with their norms on the residual stream, in sequence or in parallel.

A layer does not add its own output to the residual. It returns the output as `delta`, and the next layer adds `delta` to
`residual` in one operation with its norm. `delta` is None before the first layer. `residual` is updated in place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from runtime.models.blocks.hybrid import HybridBlock
from runtime.models.blocks.mixer import Mixers, Tables, build_mixer
from runtime.models.blocks.mlp import build_mlp
from runtime.models.blocks.norm import NoNormBlock, NormBlock, build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.layer import (
    MLP,
    AnyLayer,
    FusedLayer,
    HybridLayer,
    Layer,
    Mixer,
    ParallelLayer,
    PostNormLayer,
    SingleLayer,
)
from runtime.models.spec.mlp import GatedMLP, MoE, PlainMLP
from runtime.models.spec.norm import Norm


class LayerBlock(Protocol):
    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        """Add `delta` to `residual` [T, H] in place, and return the layer's output [T, H] as a new tensor. The caller adds the
        output."""
        ...


class SequentialBlock:
    def __init__(
        self, layer: Layer, name: str, hidden_size: int, weights: Weights, tables: Tables, first_cache: int
    ) -> None:
        def norms(names: tuple[str, str] | None, first: Norm) -> tuple[NormBlock, NormBlock] | None:
            if names is None:
                return None
            return (
                build_norm(first, f"{name}.{names[0]}", weights),
                build_norm(layer.norm, f"{name}.{names[1]}", weights),
            )

        before = norms(layer.before, layer.norm if layer.mixer_norm is None else layer.mixer_norm)
        self._before_mixer, self._before_mlp = (NoNormBlock(), NoNormBlock()) if before is None else before
        self._after = norms(layer.after, layer.norm)
        self._multiplier = layer.multiplier
        self._mixers = Mixers(layer.mixer, name, hidden_size, weights, tables, first_cache)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        x = self._mixers.forward_normed(self._before_mixer, delta, residual, step)
        if self._after is not None:
            x = self._after[0].forward(x)
        if self._multiplier != 1.0:
            x *= self._multiplier
        x = self._mlp.forward_normed(self._before_mlp, x, residual, step)
        if self._after is not None:
            x = self._after[1].forward(x)
        if self._multiplier != 1.0:
            x *= self._multiplier
        return x


class PostNormBlock:
    """Layer with norms after attention and MLP, whose output is the last norm's output. It returns all of its output as `delta`
    and sets the residual to zero. If a model's first layer is of this type, all layers are."""

    def __init__(
        self, layer: PostNormLayer, name: str, hidden_size: int, weights: Weights, tables: Tables, first_cache: int
    ) -> None:
        self._mixer_norm, self._mlp_norm = (build_norm(layer.norm, f"{name}.{each}", weights) for each in layer.norms)
        self._mixers = Mixers(layer.mixer, name, hidden_size, weights, tables, first_cache)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        stream = delta
        if stream is None:
            stream = residual.clone()
            residual.zero_()
        stream = self._mixer_norm.of_sum(self._mixers.forward(stream, step), stream)
        return self._mlp_norm.of_sum(self._mlp.forward(stream, step), stream)


class ParallelBlock:
    def __init__(
        self, layer: ParallelLayer, name: str, hidden_size: int, weights: Weights, tables: Tables, first_cache: int
    ) -> None:
        norms = [build_norm(layer.norm, f"{name}.{each}", weights) for each in layer.norms]
        self._norm = norms[0]
        self._mlp_norm = norms[1] if len(norms) == 2 else None
        self._mixers = Mixers(layer.mixer, name, hidden_size, weights, tables, first_cache)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        x = self._norm.add(delta, residual)
        added = self._mixers.forward(x, step)
        added += self._mlp.forward(x if self._mlp_norm is None else self._mlp_norm.forward(residual), step)
        return added


class SingleMixerBlock:
    def __init__(
        self,
        layer: SingleLayer,
        mixer: Mixer,
        name: str,
        hidden_size: int,
        weights: Weights,
        tables: Tables,
        first_cache: int,
    ) -> None:
        self._norm = build_norm(layer.norm, f"{name}.{layer.before}", weights)
        self._mixers = Mixers(mixer, name, hidden_size, weights, tables, first_cache)

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        return self._mixers.forward(self._norm.add(delta, residual), step)


class SingleMLPBlock:
    def __init__(self, layer: SingleLayer, mlp: MLP, name: str, hidden_size: int, weights: Weights) -> None:
        self._norm = build_norm(layer.norm, f"{name}.{layer.before}", weights)
        self._mlp = build_mlp(mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        return self._mlp.forward(self._norm.add(delta, residual), step)


class FusedBlock:
    def __init__(
        self, layer: FusedLayer, name: str, hidden_size: int, weights: Weights, tables: Tables, first_cache: int
    ) -> None:
        self._embedding_norm, self._hidden_norm, self._mlp_norm = (
            build_norm(layer.norm, f"{name}.{each}", weights) for each in layer.norms
        )
        self._normed_residual = layer.normed_residual
        self._mixers = Mixers(layer.mixer, name, hidden_size, weights, tables, first_cache)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        assert step.input_embeds is not None
        normed = self._hidden_norm.add(delta, residual)
        if self._normed_residual:
            residual.copy_(normed)
        x = torch.cat([self._embedding_norm.forward(step.input_embeds), normed], dim=1)
        return self._mlp.forward(self._mlp_norm.add(self._mixers.forward(x, step), residual), step)


def build_layer(
    layer: AnyLayer, name: str, hidden_size: int, weights: Weights, tables: Tables, first_cache: int
) -> LayerBlock:
    """Build a layer. `tables`: cos and sin of each rotary embedding. `first_cache`: index of the first mixer's KV cache in a
    step; further mixers of the layer have the following indices."""
    match layer:
        case Layer():
            return SequentialBlock(layer, name, hidden_size, weights, tables, first_cache)
        case PostNormLayer():
            return PostNormBlock(layer, name, hidden_size, weights, tables, first_cache)
        case ParallelLayer():
            return ParallelBlock(layer, name, hidden_size, weights, tables, first_cache)
        case SingleLayer(block):
            if isinstance(block, GatedMLP | PlainMLP | MoE):
                return SingleMLPBlock(layer, block, name, hidden_size, weights)
            return SingleMixerBlock(layer, block, name, hidden_size, weights, tables, first_cache)
        case FusedLayer():
            return FusedBlock(layer, name, hidden_size, weights, tables, first_cache)
        case HybridLayer():
            mixer = build_mixer(layer.mixer, name, hidden_size, weights, tables, first_cache + 1)
            cos_sin = tables[layer.shared.attention.rope]
            return HybridBlock(layer, mixer, name, hidden_size, weights, cos_sin, first_cache)
