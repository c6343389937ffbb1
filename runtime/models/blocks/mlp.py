"""Blocks that process each token separately: MLPs of two matrices, gated MLPs of three, and mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

import ops
from ops.symbols import NotTraceable, Symbol
from runtime.models.blocks.norm import NormBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.layer import MLP
from runtime.models.spec.mlp import GatedMLP, MoE, PlainMLP, Router


class MLPBlock:
    """Block that processes each token separately."""

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Return the block's output [T, H] for x [T, H], as a new tensor; x is unchanged."""
        raise NotImplementedError

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        """Add `delta`, if any, to `residual` [T, H] in place, and return `forward` of its norm."""
        return self.forward(norm.add(delta, residual), step)


class GatedMLPBlock(MLPBlock):
    def __init__(self, mlp: GatedMLP, layer: str, hidden_size: int, weights: Weights) -> None:
        gate_up, down = mlp.linears(layer, hidden_size)
        self._gate_up, self._down = weights.linears[gate_up.name], weights.linears[down.name]
        self._activation, self._size = mlp.activation.value, mlp.intermediate_size
        self._multipliers = mlp.gate_multiplier, mlp.down_multiplier

    def forward_normed(self, norm: NormBlock, delta: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        return self.forward(norm.add_for(self._gate_up, delta, residual), step)

    def forward(self, x: Tensor | ops.RoundedRows, step: ForwardStep) -> Tensor:
        of_gate, of_down = self._multipliers
        if of_gate == 1.0:
            adapters = step.token_adapters
            out = ops.gated_mlp(x, self._gate_up.of(adapters), self._down.of(adapters), self._activation)
        else:
            gate_up = step.linear(x, self._gate_up)
            gate_up[:, : self._size] *= of_gate
            out = step.linear(ops.gated(gate_up, self._activation), self._down)
        if of_down != 1.0:
            out *= of_down
        return out


class PlainMLPBlock(MLPBlock):
    def __init__(self, mlp: PlainMLP, layer: str, hidden_size: int, weights: Weights) -> None:
        up, down = mlp.linears(layer, hidden_size)
        self._up, self._down = weights.linears[up.name], weights.linears[down.name]
        self._activation = mlp.activation.value

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        up = self._up.of(step.token_adapters)
        return step.linear(ops.activated_linear(x, up, self._activation), self._down)


class MoEBlock(MLPBlock):
    def __init__(self, moe: MoE, layer: str, hidden_size: int, weights: Weights) -> None:
        self._router = weights.linears[moe.router_linear(layer, hidden_size).name]
        self._routing = _routing(moe.router)
        self._wide = moe.router.float32
        self._correction_bias = weights.tensors.get(moe.correction_bias_name(layer))
        self._experts = weights.experts[moe.experts(layer, hidden_size).name]
        self._counts = weights.counts.get(moe.experts(layer, hidden_size).name)
        self._weighs_input = moe.weighs_input
        self._latent = [weights.linears[linear.name] for linear in moe.latent_linears(layer, hidden_size)]
        self._shared = None if moe.shared is None else build_mlp(moe.shared, layer, hidden_size, weights)
        self._shared_gate = (
            weights.linears[moe.shared_gate_linear(layer, hidden_size).name] if moe.shared_gate else None
        )

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        logits = step.linear(x.float() if self._wide else x, self._router)
        if self._counts is not None:
            self._count(self._counts, logits, step)
        experts = self._experts.of(step.token_adapters)
        if not self._latent:
            given = x * logits.amax(1, keepdim=True).float().sigmoid().to(x.dtype) if self._weighs_input else x
            return ops.moe(given, logits, experts, self._routing, self._correction_bias, self._for_all(x, step))
        into, out = self._latent
        chosen = ops.moe(step.linear(x, into), logits, experts, self._routing, self._correction_bias)
        mixed, shared = step.linear(chosen, out), self._for_all(x, step)
        return mixed if shared is None else mixed.add_(shared)

    def _count(self, counts: Tensor, logits: Tensor, step: ForwardStep) -> None:
        if isinstance(logits, Symbol):
            raise NotTraceable("counting tokens of experts")
        slots = next(each for each in step.slot_mapping if len(each) == len(logits))
        ops.count_experts(counts, logits, self._routing, self._correction_bias, slots >= 0)

    def _for_all(self, x: Tensor, step: ForwardStep) -> Tensor | None:
        if self._shared is None:
            return None
        shared = self._shared.forward(x, step)
        return shared if self._shared_gate is None else shared.mul_(torch.sigmoid(step.linear(x, self._shared_gate)))


def _routing(router: Router) -> ops.Routing:
    return ops.Routing(
        router.top_k, router.score, router.renormalize, router.scale, router.num_groups, router.top_groups,
        router.group_score, router.min_sum, router.jitter,
    )  # fmt: skip


def build_mlp(mlp: MLP, layer: str, hidden_size: int, weights: Weights) -> MLPBlock:
    match mlp:
        case GatedMLP():
            return GatedMLPBlock(mlp, layer, hidden_size, weights)
        case PlainMLP():
            return PlainMLPBlock(mlp, layer, hidden_size, weights)
        case MoE():
            return MoEBlock(mlp, layer, hidden_size, weights)
