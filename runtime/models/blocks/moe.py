"""Mixture of experts: a router, the experts it chooses, and what every token takes besides."""

from __future__ import annotations

import torch
from torch import Tensor

import ops
from ops.symbols import NotTraceable, Symbol
from runtime.models.blocks.gated_mlp import GatedMLPBlock
from runtime.models.blocks.norm import NormBlock
from runtime.models.blocks.plain_mlp import PlainMLPBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.mlp import GatedMLP, PlainMLP
from runtime.models.spec.moe import MoE, Router


class MoEBlock:
    def __init__(self, moe: MoE, layer: str, hidden_size: int, weights: Weights) -> None:
        self._router = weights.linears[moe.router_linear(layer, hidden_size).name]
        self._routing = _routing(moe.router)
        self._wide = moe.router.float32
        self._correction_bias = weights.tensors.get(moe.correction_bias_name(layer))
        self._experts = weights.experts[moe.experts(layer, hidden_size).name]
        self._counts = weights.counts.get(moe.experts(layer, hidden_size).name)
        self._weighs_input = moe.weighs_input
        self._latent = [weights.linears[linear.name] for linear in moe.latent_linears(layer, hidden_size)]
        self._shared = _shared(moe.shared, layer, hidden_size, weights)
        self._shared_gate = (
            weights.linears[moe.shared_gate_linear(layer, hidden_size).name] if moe.shared_gate else None
        )

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        return self.forward(norm.add(delta, residual), step)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, H] -> [T, H]."""
        logits = ops.linear(x.float() if self._wide else x, self._router)
        if self._counts is not None:
            self._count(self._counts, logits, step)
        if not self._latent:
            given = x * logits.amax(1, keepdim=True).float().sigmoid().to(x.dtype) if self._weighs_input else x
            return ops.moe(given, logits, self._experts, self._routing, self._correction_bias, self._for_all(x, step))
        into, out = self._latent
        chosen = ops.moe(ops.linear(x, into), logits, self._experts, self._routing, self._correction_bias)
        mixed, shared = ops.linear(chosen, out), self._for_all(x, step)
        return mixed if shared is None else mixed.add_(shared)

    def _count(self, counts: Tensor, logits: Tensor, step: ForwardStep) -> None:
        """Of tokens that are stored: all but padding."""
        if isinstance(logits, Symbol):
            raise NotTraceable("experts whose tokens are counted")
        slots = next(each for each in step.slot_mapping if len(each) == len(logits))
        ops.count_experts(counts, logits, self._routing, self._correction_bias, slots >= 0)

    def _for_all(self, x: Tensor, step: ForwardStep) -> Tensor | None:
        if self._shared is None:
            return None
        shared = self._shared.forward(x, step)
        return shared if self._shared_gate is None else shared.mul_(torch.sigmoid(ops.linear(x, self._shared_gate)))


def _shared(
    mlp: GatedMLP | PlainMLP | None, layer: str, hidden_size: int, weights: Weights
) -> GatedMLPBlock | PlainMLPBlock | None:
    match mlp:
        case GatedMLP():
            return GatedMLPBlock(mlp, layer, hidden_size, weights)
        case PlainMLP():
            return PlainMLPBlock(mlp, layer, hidden_size, weights)
        case None:
            return None


def _routing(router: Router) -> ops.Routing:
    return ops.Routing(
        router.top_k, router.score, router.renormalize, router.scale, router.num_groups, router.top_groups,
        router.group_score, router.min_sum, router.jitter,
    )  # fmt: skip
