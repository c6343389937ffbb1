"""The part of a layer that works on each token alone: which block computes which description."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.models.blocks.gated_mlp import GatedMLPBlock
from runtime.models.blocks.moe import MoEBlock
from runtime.models.blocks.norm import NormBlock
from runtime.models.blocks.plain_mlp import PlainMLPBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.layer import MLP
from runtime.models.spec.mlp import GatedMLP, PlainMLP
from runtime.models.spec.moe import MoE


class MLPBlock(Protocol):
    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H], left as it is -> [T, H], a fresh tensor."""
        ...

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        """residual [T, H] += delta, where there is one -> `forward` of its norm."""
        ...


def build_mlp(mlp: MLP, layer: str, hidden_size: int, weights: Weights) -> MLPBlock:
    match mlp:
        case GatedMLP():
            return GatedMLPBlock(mlp, layer, hidden_size, weights)
        case PlainMLP():
            return PlainMLPBlock(mlp, layer, hidden_size, weights)
        case MoE():
            return MoEBlock(mlp, layer, hidden_size, weights)
