"""Layers: how mixer and MLP stand on the residual stream, one after the other or side by side.

What a layer adds is handed on unadded, so that the addition is one operation with the norm that follows, be it the next
layer's: `delta`, None before the first layer, belongs to `residual`, which is updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

import ops
from runtime.models.blocks.attention import AttentionBlock, LayerMemory
from runtime.models.blocks.gated_delta_net import GatedDeltaNetBlock
from runtime.models.blocks.latent_attention import LatentAttentionBlock
from runtime.models.blocks.mamba import MambaBlock
from runtime.models.blocks.mamba2 import Mamba2Block
from runtime.models.blocks.mlp import build_mlp
from runtime.models.blocks.norm import NoNorm, NormBlock, build_norm
from runtime.models.blocks.short_conv import ShortConvBlock
from runtime.models.blocks.weights import Weights
from runtime.models.spec.attention import Attention, LatentAttention
from runtime.models.spec.layer import MLP, AnyLayer, Layer, Mixer, ParallelLayer, SideBySide, SingleLayer, branches
from runtime.models.spec.mlp import GatedMLP, PlainMLP
from runtime.models.spec.moe import MoE
from runtime.models.spec.recurrent import GatedDeltaNet, Mamba, Mamba2, ShortConv
from runtime.models.spec.rope import Rope

Tables = Mapping[Rope | None, Tensor]


class LayerStep(NamedTuple):
    """What all layers read of a step: positions [T] int64, and slots and what attention is asked by table of blocks.

    `embedding` [T, H]: what the residual stream began with, if some layer asks for it."""

    positions: Tensor
    slots: Sequence[Tensor]
    metas: Sequence[ops.AttentionMeta]
    embedding: Tensor | None = None


class LayerBlock(Protocol):
    def forward(self, delta: Tensor | None, residual: Tensor, memory: Sequence[LayerMemory], step: LayerStep) -> Tensor:
        """delta and residual [T, H]; `memory`: one entry for each mixer -> what this layer adds to residual + delta, [T, H], a
        fresh tensor."""
        ...


class MixerBlock(Protocol):
    """What lets a token know of those before it."""

    def forward(
        self, x: Tensor, positions: Tensor, memory: LayerMemory, slots: Tensor, meta: ops.AttentionMeta
    ) -> Tensor:
        """x [T, H] -> [T, H], a fresh tensor."""
        ...


class Mixers:
    """All that a layer has, each with a memory of its own; what they give is added."""

    def __init__(
        self, mixer: Mixer | SideBySide, name: str, hidden_size: int, weights: Weights, tables: Tables
    ) -> None:
        self._branches = [
            (build_mixer(branch.mixer, name, hidden_size, weights, tables), branch) for branch in branches(mixer)
        ]

    def forward(self, x: Tensor, memory: Sequence[LayerMemory], step: LayerStep) -> Tensor:
        """x [T, H] -> [T, H], a fresh tensor."""
        parts = []
        for (block, branch), own in zip(self._branches, memory, strict=True):
            given = x if branch.input_multiplier == 1.0 else x * branch.input_multiplier
            part = block.forward(given, step.positions, own, step.slots[own.table], step.metas[own.table])
            if branch.output_multiplier != 1.0:
                part *= branch.output_multiplier
            parts.append(part)
        added, *others = parts
        for other in others:
            added += other
        return added


class SequentialBlock:
    def __init__(self, layer: Layer, name: str, hidden_size: int, weights: Weights, tables: Tables) -> None:
        def norms(names: tuple[str, str] | None) -> tuple[NormBlock, NormBlock] | None:
            if names is None:
                return None
            return (
                build_norm(layer.norm, f"{name}.{names[0]}", weights),
                build_norm(layer.norm, f"{name}.{names[1]}", weights),
            )

        before = norms(layer.before)
        self._before_mixer, self._before_mlp = (NoNorm(), NoNorm()) if before is None else before
        self._after = norms(layer.after)
        self._multiplier = layer.multiplier
        self._mixers = Mixers(layer.mixer, name, hidden_size, weights, tables)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, memory: Sequence[LayerMemory], step: LayerStep) -> Tensor:
        x = self._before_mixer.add(delta, residual)
        x = self._mixers.forward(x, memory, step)
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
    def __init__(self, layer: ParallelLayer, name: str, hidden_size: int, weights: Weights, tables: Tables) -> None:
        norms = [build_norm(layer.norm, f"{name}.{each}", weights) for each in layer.norms]
        self._norm = norms[0]
        self._mlp_norm = norms[1] if len(norms) == 2 else None
        self._mixers = Mixers(layer.mixer, name, hidden_size, weights, tables)
        self._mlp = build_mlp(layer.mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, memory: Sequence[LayerMemory], step: LayerStep) -> Tensor:
        x = self._norm.add(delta, residual)
        added = self._mixers.forward(x, memory, step)
        added += self._mlp.forward(x if self._mlp_norm is None else self._mlp_norm.forward(residual))
        return added


class SingleMixerBlock:
    def __init__(
        self, layer: SingleLayer, mixer: Mixer, name: str, hidden_size: int, weights: Weights, tables: Tables
    ) -> None:
        self._norm = build_norm(layer.norm, f"{name}.norm", weights)
        self._mixers = Mixers(mixer, name, hidden_size, weights, tables)

    def forward(self, delta: Tensor | None, residual: Tensor, memory: Sequence[LayerMemory], step: LayerStep) -> Tensor:
        return self._mixers.forward(self._norm.add(delta, residual), memory, step)


class SingleMLPBlock:
    def __init__(self, layer: SingleLayer, mlp: MLP, name: str, hidden_size: int, weights: Weights) -> None:
        self._norm = build_norm(layer.norm, f"{name}.norm", weights)
        self._mlp = build_mlp(mlp, name, hidden_size, weights)

    def forward(self, delta: Tensor | None, residual: Tensor, memory: Sequence[LayerMemory], step: LayerStep) -> Tensor:
        return self._mlp.forward(self._norm.add(delta, residual))


def build_mixer(mixer: Mixer, layer: str, hidden_size: int, weights: Weights, tables: Tables) -> MixerBlock:
    match mixer:
        case LatentAttention():
            return LatentAttentionBlock(mixer, layer, hidden_size, weights, tables[mixer.rope])
        case Attention():
            return AttentionBlock(mixer, layer, hidden_size, weights, tables[mixer.rope])
        case Mamba2():
            return Mamba2Block(mixer, layer, hidden_size, weights)
        case Mamba():
            return MambaBlock(mixer, layer, hidden_size, weights)
        case GatedDeltaNet():
            return GatedDeltaNetBlock(mixer, layer, hidden_size, weights)
        case ShortConv():
            return ShortConvBlock(mixer, layer, hidden_size, weights)


def build_layer(layer: AnyLayer, name: str, hidden_size: int, weights: Weights, tables: Tables) -> LayerBlock:
    """`tables`: of every rotary embedding that the layers have."""
    match layer:
        case Layer():
            return SequentialBlock(layer, name, hidden_size, weights, tables)
        case ParallelLayer():
            return ParallelBlock(layer, name, hidden_size, weights, tables)
        case SingleLayer(block):
            if isinstance(block, GatedMLP | PlainMLP | MoE):
                return SingleMLPBlock(layer, block, name, hidden_size, weights)
            return SingleMixerBlock(layer, block, name, hidden_size, weights, tables)
