"""Mixture of experts by oneloop_native. An expert is two packed linear layers, applied to the tokens that selected it.

The outputs of a token's experts are added in the order of expert indices, so its result does not depend on other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ops.activation import native as activation
from ops.gemm.native import NativeLinearWeight
from ops.gemm.weight import check_refill
from ops.moe.reference import clamped_swiglu, route, sorted_here
from ops.moe.weights import Beside, ExpertShape, ExpertWeights, Half, Routing
from ops.stored import Stored

_GROUP = 64  # pairs of token and expert per group; an expert with more is a separate group


class _Span(NamedTuple):
    expert: int
    start: int
    end: int


class NativeExpertWeights(ExpertWeights):
    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.nbytes = 0
        self._packed: dict[tuple[Half, int], NativeLinearWeight] = {}

    def fill(self, half: Half, expert: int, stored: Stored) -> None:
        packed = self._packed.get((half, expert))
        if packed is None:
            packed = NativeLinearWeight(stored)
            check_refill("weight", (packed.out_features, packed.in_features), self.shape.matrix(half))
            self._packed[half, expert] = packed
        else:
            self.nbytes -= packed.nbytes
            packed.refill(stored)
        self.nbytes += packed.nbytes

    def mix(
        self, x: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None, plus: Tensor | None,
        beside: Beside | None = None,
    ) -> Tensor:  # fmt: skip
        ids, weights = route(logits, routing, e_score_correction_bias)
        shares = weights.flatten()
        out = torch.zeros_like(x) if plus is None else plus.clone()
        for places, spans in _groups(ids, self.shape):
            tokens = places // routing.top_k
            inner = self._activate(self._each("gate_up", spans, x[tokens], tokens, beside))
            parts = self._each("down", spans, inner, tokens, beside)
            out.index_add_(0, tokens, parts.mul_(shares[places, None]))
        return out

    def _activate(self, gate_up: Tensor) -> Tensor:
        kind = self.shape.activation
        if not isinstance(kind, str):
            return clamped_swiglu(gate_up, kind)
        return activation.gated(gate_up, kind) if self.shape.gated else activation.activate(gate_up, kind)

    def _each(self, half: Half, spans: list[_Span], x: Tensor, tokens: Tensor, beside: Beside | None) -> Tensor:
        """Multiply each span of x [pairs, in] by its expert's matrix. `tokens` [pairs]: token of each pair."""
        out = torch.empty(len(x), self.shape.matrix(half)[0])
        for expert, start, end in spans:
            self._packed[half, expert].matmul_into(x[start:end], out[start:end])
            if beside is not None:
                beside.add(half, expert, x[start:end], tokens[start:end], out[start:end])
        return out


def _groups(ids: Tensor, shape: ExpertShape) -> Iterator[tuple[Tensor, list[_Span]]]:
    """Yield groups of chosen experts [T, top_k]: indices into the flattened ids, ascending by expert, then by place, and the
    span of each expert. A group is small enough that intermediate results stay in the CPU cache."""
    order, counts = sorted_here(ids, shape)
    spans: list[_Span] = []
    begin = length = 0
    for expert, count in enumerate(counts):
        if count and length + count > _GROUP:
            if spans:
                yield order[begin : begin + length], spans
            spans, begin, length = [], begin + length, 0
        if count:
            spans.append(_Span(expert, length, length + count))
        length += count
    if spans:
        yield order[begin:], spans
