"""What lets a token know of those before it: which block computes which description, and what it is given of a step."""

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
from runtime.models.blocks.short_conv import ShortConvBlock
from runtime.models.blocks.weights import Weights
from runtime.models.spec.attention import Attention, LatentAttention
from runtime.models.spec.layer import Mixer, SideBySide, branches
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
