"""Mixers: attention and recurrent blocks, and layers that add the outputs of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from runtime.models.blocks.attention import AttentionBlock, LatentAttentionBlock
from runtime.models.blocks.cross_attention import CrossAttentionBlock
from runtime.models.blocks.norm import NormBlock
from runtime.models.blocks.recurrent import GatedDeltaNetBlock, Mamba2Block, MambaBlock, ShortConvBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.attention import Attention, CrossAttention, LatentAttention
from runtime.models.spec.layer import Mixer, ParallelMixers, branches
from runtime.models.spec.recurrent import GatedDeltaNet, Mamba, Mamba2, ShortConv
from runtime.models.spec.rope import Rope

Tables = Mapping[Rope | None, Tensor]


class MixerBlock(Protocol):
    """Block in which tokens read earlier tokens, by attention or a recurrent state."""

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Return the block's output [T, H] for x [T, H], as a new tensor."""
        ...


class Mixers:
    """All mixers of a layer, whose outputs are added. `first_cache`: index of the first mixer's KV cache in a step; further
    mixers have the following indices."""

    def __init__(
        self,
        mixer: Mixer | ParallelMixers,
        name: str,
        hidden_size: int,
        weights: Weights,
        tables: Tables,
        first_cache: int,
    ) -> None:
        self._branches = [
            (build_mixer(branch.mixer, name, hidden_size, weights, tables, index), branch)
            for index, branch in enumerate(branches(mixer), start=first_cache)
        ]

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        """Add `delta`, if any, to `residual` [T, H] in place, and return `forward` of its norm. If the only reader is one linear
        layer, the norm may return quantised rows."""
        block, branch = self._branches[0]
        if len(self._branches) > 1 or branch.input_multiplier != 1.0 or not isinstance(block, AttentionBlock):
            return self.forward(norm.add(delta, residual), step)
        mixed = block.forward(norm.add_for(block.qkv, delta, residual), step)
        if branch.output_multiplier != 1.0:
            mixed *= branch.output_multiplier
        return mixed

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Return the sum of the mixers' outputs [T, H] for x [T, H], as a new tensor."""
        parts = []
        for block, branch in self._branches:
            given = x if branch.input_multiplier == 1.0 else x * branch.input_multiplier
            part = block.forward(given, step)
            if branch.output_multiplier != 1.0:
                part *= branch.output_multiplier
            parts.append(part)
        added, *others = parts
        for other in others:
            added += other
        return added


def build_mixer(
    mixer: Mixer, layer: str, hidden_size: int, weights: Weights, tables: Tables, cache_index: int
) -> MixerBlock:
    """Build a mixer. `cache_index`: index of the mixer's KV cache in a step."""
    match mixer:
        case LatentAttention():
            return LatentAttentionBlock(mixer, layer, hidden_size, weights, tables[mixer.rope], cache_index)
        case Attention():
            return AttentionBlock(mixer, layer, hidden_size, weights, tables[mixer.rope], cache_index)
        case CrossAttention():
            return CrossAttentionBlock(mixer, layer, hidden_size, weights, cache_index)
        case Mamba2():
            return Mamba2Block(mixer, layer, hidden_size, weights, cache_index)
        case Mamba():
            return MambaBlock(mixer, layer, hidden_size, weights, cache_index)
        case GatedDeltaNet():
            return GatedDeltaNetBlock(mixer, layer, hidden_size, weights, cache_index)
        case ShortConv():
            return ShortConvBlock(mixer, layer, hidden_size, weights, cache_index)
