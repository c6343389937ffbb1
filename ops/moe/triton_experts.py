"""Mixture of experts in Triton: which kernels, and how large, for how many tokens. Measured on an H200 (tests/ops/bench_moe.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.moe import triton_grouped
from ops.moe.reference import StackedExpertWeights
from ops.moe.routing import Routing
from ops.moe.triton_grouped import Tiles
from ops.moe.triton_route import TOKENS_OF_EACH_ROUTE, route
from ops.moe.weights import ExpertShape


class Grouped(NamedTuple):
    """For steps that bring an expert up to `pairs` pairs on average."""

    pairs: float
    gate_up: Tiles
    down: Tiles


GROUPED = (
    Grouped(12, Tiles(16, 64, 128, 4, 5), Tiles(16, 64, 128, 4, 3)),
    Grouped(32, Tiles(32, 128, 128, 4, 4), Tiles(32, 128, 64, 4, 4)),
    Grouped(64, Tiles(64, 64, 64, 4, 4), Tiles(64, 128, 64, 4, 4)),
    Grouped(256, Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
    Grouped(float("inf"), Tiles(128, 128, 64, 8, 3), Tiles(128, 256, 64, 8, 3)),
)
FLOAT32_GROUPED = (
    Grouped(24, Tiles(16, 32, 32, 4, 2), Tiles(16, 32, 32, 4, 2)),
    Grouped(float("inf"), Tiles(64, 32, 32, 4, 2), Tiles(64, 64, 32, 4, 2)),
)


class TritonExpertWeights(StackedExpertWeights):
    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._grouped = FLOAT32_GROUPED if dtype == torch.float32 else GROUPED

    def mix(
        self, x: Tensor, logits: Tensor, routing: Routing, correction: Tensor | None, plus: Tensor | None
    ) -> Tensor:
        if not x.shape[0]:
            return torch.empty_like(x)
        if x.device.type == "cuda":
            self._compile(x, logits, routing, correction, plus)
        return mix(self, x, logits, routing, correction, plus, self.choose(x.shape[0], routing.top_k))

    def choose(self, num_tokens: int, top_k: int) -> Grouped:
        per_expert = num_tokens * top_k / self.shape.num_experts
        return next(grouped for grouped in self._grouped if per_expert <= grouped.pairs)

    def _compile(
        self, x: Tensor, logits: Tensor, routing: Routing, correction: Tensor | None, plus: Tensor | None
    ) -> None:
        """Run every kernel that any number of tokens will need, once a shape: none is left to be compiled in a capture."""
        key = (self.shape, routing, x.dtype, logits.dtype, correction is None, plus is None, x.device)
        if key in _compiled:
            return
        _compiled.add(key)
        for num_tokens in TOKENS_OF_EACH_ROUTE:
            route(logits.new_zeros(num_tokens, self.shape.num_experts), routing, correction)
        plus = None if plus is None else torch.zeros_like(plus[:1])
        for choice in self._grouped:
            mix(self, torch.zeros_like(x[:1]), torch.zeros_like(logits[:1]), routing, correction, plus, choice)


_compiled: set[tuple[ExpertShape, Routing, torch.dtype, torch.dtype, bool, bool, torch.device]] = set()


def mix(
    experts: StackedExpertWeights, x: Tensor, logits: Tensor, routing: Routing, correction: Tensor | None,
    plus: Tensor | None, choice: Grouped,
) -> Tensor:  # fmt: skip
    """As `ops.moe`, of one token at least, by the chosen kernels."""
    x, logits, plus = x.contiguous(), logits.contiguous(), None if plus is None else plus.contiguous()
    routed = route(logits, routing, correction)
    inner = triton_grouped.product(experts, "gate_up", x, routed, choice.gate_up)
    parts = triton_grouped.product(experts, "down", inner, routed, choice.down)
    return triton_grouped.add_parts(parts, routing.top_k, plus)
