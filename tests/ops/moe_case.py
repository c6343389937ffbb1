"""Experts with random weights, in float64 and in any other form, and what they make of tokens, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, relu, silu

import ops
from ops.moe.reference import route

ACTIVATIONS = {"silu": silu, "relu2": lambda x: relu(x) ** 2}


@dataclass(frozen=True)
class Clamped:
    """An `ops.moe.weights.ClampedActivation`."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeCase:
    """Everything in float64. weights and biases by half, [E, out, in] and [E, out]."""

    shape: ops.ExpertShape
    routing: ops.Routing
    weights: dict
    biases: dict
    x: Tensor
    logits: Tensor
    correction: Tensor | None
    plus: Tensor | None

    def fill(self, experts: ops.ExpertWeights, dtype: torch.dtype, device: str = "cpu") -> ops.ExpertWeights:
        for half, weights in self.weights.items():
            for expert, weight in enumerate(weights):
                bias = self.biases[half][expert].to(device, dtype) if self.shape.bias else None
                experts.fill(half, expert, ops.StoredWeight.dense(weight.to(device, dtype), bias))
        return experts

    def fill_part(self, experts: ops.ExpertWeights, dtype: torch.dtype, device: str = "cpu") -> ops.ExpertWeights:
        """With those of its own shape, neighbours among all."""
        first, num = experts.shape.first, experts.shape.num_experts
        part = replace(
            self,
            weights={half: each[first : first + num] for half, each in self.weights.items()},
            biases={half: each[first : first + num] for half, each in self.biases.items()},
        )
        return part.fill(experts, dtype, device)

    def parts(self, num: int) -> list[ops.ExpertShape]:
        """Shapes of neighbours, `num` at a time."""
        total = self.shape.num_experts
        return [replace(self.shape, num_experts=num, first=at, num_routed=total) for at in range(0, total, num)]

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> dict:
        """The tensor arguments of `ops.moe`, logits and correction in float32: rounded, they may choose others."""
        plus = None if self.plus is None else self.plus.to(device, dtype)
        correction = None if self.correction is None else self.correction.float().to(device)
        return {
            "x": self.x.to(device, dtype), "logits": self.logits.float().to(device), "e_score_correction_bias": correction,
            "plus": plus,
        }  # fmt: skip

    def expected(self) -> Tensor:
        """By the definition: every token asks each of its experts."""
        ids, shares = route(self.logits, self.routing, self.correction)
        out = torch.zeros_like(self.x) if self.plus is None else self.plus.clone()
        for token, row in enumerate(self.x):
            for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
                inner = self._activate(self._linear("gate_up", expert, row))
                out[token] += share * self._linear("down", expert, inner)
        return out

    def _activate(self, row: Tensor) -> Tensor:
        kind = self.shape.activation
        if not self.shape.gated:
            return ACTIVATIONS[kind](row)
        gate, up = row.chunk(2)
        if isinstance(kind, str):
            return ACTIVATIONS[kind](gate) * up
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * torch.sigmoid(gate * kind.alpha) * (up + 1)

    def _linear(self, half: str, expert: int, row: Tensor) -> Tensor:
        return linear(row, self.weights[half][expert], self.biases[half][expert] if self.shape.bias else None)


def moe_case(
    num_tokens: int, shape: ops.ExpertShape, routing: ops.Routing, *, corrected: bool = False, plus: bool = False, seed: int = 0
) -> MoeCase:  # fmt: skip
    random = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    experts, hidden = shape.num_experts, shape.hidden_size
    matrices = {half: shape.matrix(half) for half in ("gate_up", "down")}
    return MoeCase(
        shape,
        routing,
        {half: draw(experts, out, into) / into**0.5 for half, (out, into) in matrices.items()},
        {half: draw(experts, out) for half, (out, _) in matrices.items()},
        draw(num_tokens, hidden),
        draw(num_tokens, experts),
        draw(experts) / 4 if corrected else None,
        draw(num_tokens, hidden) if plus else None,
    )
