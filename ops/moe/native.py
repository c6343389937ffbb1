"""Mixture of experts by oneloop_native: each chosen expert is two packed linear layers on the rows that chose it.

A token's parts are added in the order of their experts' numbers, so its result does not depend on the tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.activation import native as activation
from ops.gemm.native import NativeBlockWeight, NativeInt8Weight, NativeLinearWeight
from ops.gemm.weight import BlockRows, LinearWeight
from ops.moe.reference import by_expert, gate, route
from ops.moe.routing import Routing
from ops.moe.weights import ExpertShape, ExpertWeights, Half


class NativeExpertWeights(ExpertWeights):
    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.nbytes = 0
        self._packed: dict[tuple[Half, int], LinearWeight] = {}

    def fill(self, half: Half, expert: int, weight: Tensor, bias: Tensor | None) -> None:
        self._take(half, expert, NativeLinearWeight(weight, bias))

    def fill_blocks(self, half: Half, expert: int, parts: Sequence[BlockRows], bias: Tensor | None) -> None:
        self._take(half, expert, NativeBlockWeight(parts, bias))

    def fill_int8(self, half: Half, expert: int, weight: Tensor, bias: Tensor | None) -> None:
        self._take(half, expert, NativeInt8Weight(weight, bias))

    def _take(self, half: Half, expert: int, packed: LinearWeight) -> None:
        self._packed[half, expert] = packed
        self.nbytes += packed.nbytes

    def mix(
        self, x: Tensor, logits: Tensor, routing: Routing, correction: Tensor | None, plus: Tensor | None
    ) -> Tensor:
        ids, weights = route(logits, routing, correction)
        out = torch.zeros_like(x) if plus is None else plus.clone()
        for expert, places in by_expert(ids):
            tokens = places // routing.top_k
            gate_up = self._packed["gate_up", expert].matmul(x[tokens])
            inner = (
                activation.silu_mul(gate_up) if self.shape.activation is None else gate(gate_up, self.shape.activation)
            )
            part = self._packed["down", expert].matmul(inner)
            out.index_add_(0, tokens, part.mul_(weights.flatten()[places, None]))
        return out
