"""Mixture of experts in plain torch, any float dtype, any device: the definition of routing and mixing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ops.activation import reference as activation
from ops.gemm.weight import overwrite
from ops.moe.weights import Beside, ClampedActivation, ExpertShape, ExpertWeights, Half, Routing
from ops.stored import Stored, only_dense


def route(logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts by logits [T, E]. Return (ids [T, top_k] int64, weights [T, top_k] in float32 or wider).

    e_score_correction_bias [E] is added to the scores for the choice only."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if routing.score == "sparsemixer":
        return _sparsemixer(wide, routing)
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    if routing.num_groups > 1:
        choice = _within_best_groups(choice, routing)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.min_sum)
    return ids, weights * routing.scale


def _within_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    grouped = choice.unflatten(-1, (routing.num_groups, -1))
    judged = grouped.amax(-1) if routing.group_score == "best" else grouped.topk(2, dim=-1).values.sum(-1)
    best = judged.topk(routing.top_groups, dim=-1).indices
    left_out = torch.ones_like(judged, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    ids, weights = [], []
    left = logits
    for _ in range(routing.top_k):
        best, at = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * routing.jitter
        ids.append(at)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, at))
        left = left.scatter(-1, at, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def activate(gate_up: Tensor, shape: ExpertShape) -> Tensor:
    """Apply the experts' activation to gate_up [..., 2 * I], or [..., I] without a gate. Return [..., I]."""
    if not isinstance(shape.activation, str):
        return clamped_swiglu(gate_up, shape.activation)
    if shape.gated:
        return activation.gated(gate_up, shape.activation)
    return activation.activate(gate_up, shape.activation)


def clamped_swiglu(gate_up: Tensor, activation: ClampedActivation) -> Tensor:
    """Apply GPT-OSS's activation to gate_up [..., 2 * I]. Return [..., I]."""
    gates, ups = gate_up.chunk(2, dim=-1)
    gates, ups = gates.clamp(max=activation.limit), ups.clamp(-activation.limit, activation.limit)
    return (ups + 1) * gates * torch.sigmoid(activation.alpha * gates)


def sorted_here(ids: Tensor, shape: ExpertShape) -> tuple[Tensor, list[int]]:
    """Return the indices of chosen experts [T, top_k] in the flattened ids, sorted by expert, then ascending, for the
    experts of `shape` only; and the number of tokens of each expert, up to the last one chosen."""
    flat = ids.flatten() - shape.first
    if shape.are_all:
        return flat.argsort(stable=True), flat.bincount().tolist()
    here = ((flat >= 0) & (flat < shape.num_experts)).nonzero().flatten()
    own = flat[here]
    return here[own.argsort(stable=True)], own.bincount().tolist()


def by_expert(ids: Tensor, shape: ExpertShape) -> Iterator[tuple[int, Tensor]]:
    """Yield each chosen expert, ascending, and its indices in the flattened ids [T, top_k], ascending."""
    order, counts = sorted_here(ids, shape)
    for expert, places in enumerate(order.split(counts)):
        if len(places):
            yield expert, places


class StackedExpertWeights(ExpertWeights):
    """Experts in stacked tensors: gate_up [E, 2 * I, H], or [E, I, H] without gates, and down [E, H, I]; optional biases [E,
    2 * I] or [E, I], and [E, H]."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.weights: dict[Half, Tensor] = {}
        self.biases: dict[Half, Tensor | None] = {}
        halves: tuple[Half, Half] = ("gate_up", "down")
        for half in halves:
            out_features, in_features = shape.matrix(half)
            self.weights[half] = torch.empty((shape.num_experts, out_features, in_features), dtype=dtype, device=device)
            bias = torch.empty((shape.num_experts, out_features), dtype=dtype, device=device) if shape.bias else None
            self.biases[half] = bias
        tensors = [*self.weights.values(), *(bias for bias in self.biases.values() if bias is not None)]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def fill(self, half: Half, expert: int, stored: Stored) -> None:
        weight, bias = only_dense(stored, self.weights[half].dtype)
        biases = self.biases[half]
        overwrite(self.weights[half][expert], weight, "weight")
        overwrite(None if biases is None else biases[expert], bias, "bias")

    def mix(
        self, x: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None, plus: Tensor | None,
        beside: Beside | None = None,
    ) -> Tensor:  # fmt: skip
        ids, weights = route(logits, routing, e_score_correction_bias)
        out = torch.zeros_like(x) if plus is None else plus.clone()
        for expert, places in by_expert(ids, self.shape):
            tokens = places // routing.top_k
            inner = activate(self._linear(x[tokens], "gate_up", expert, tokens, beside), self.shape)
            part = self._linear(inner, "down", expert, tokens, beside) * weights.flatten()[places, None]
            out.index_add_(0, tokens, part.to(out.dtype))
        return out

    def _linear(self, x: Tensor, half: Half, expert: int, tokens: Tensor, beside: Beside | None) -> Tensor:
        biases = self.biases[half]
        out = functional.linear(x, self.weights[half][expert], None if biases is None else biases[expert])
        if beside is not None:
            beside.add(half, expert, x, tokens, out)
        return out
