"""Mixture of experts in Triton: choice of kernels and tile sizes by the number of tokens."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ops import tuning
from ops.moe import triton_grouped
from ops.moe.reference import StackedExpertWeights
from ops.moe.triton_beside import shrunk
from ops.moe.triton_route import TOKENS_OF_EACH_ROUTE, Routed, route
from ops.moe.weights import Beside, ExpertShape, ExpertWeights, Half, Routing
from ops.tuning.numbers import ExpertTiles, ProductTiles


class GroupedExpertWeights(ExpertWeights):
    """Experts computed by two grouped products, for any weight format. `written`: further compile-time constants of kernels."""

    written: object = None
    _tiles: tuple[ExpertTiles, ...]

    @abstractmethod
    def product(
        self, half: Half, x: Tensor, routed: Routed, tiles: ProductTiles, added: triton_grouped.Added | None
    ) -> Tensor:
        """Return one half of the experts for all pairs of token and expert. gate_up: x [T, H] yields activated [pairs, I] in sorted
        order. down: x [pairs, I] in sorted order yields weighted [pairs, H] in the order of pairs. `added`: only if
        `takes_adapters`."""

    def mix(
        self, x: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None, plus: Tensor | None,
        beside: Beside | None = None,
    ) -> Tensor:  # fmt: skip
        if not x.shape[0]:
            return torch.empty_like(x)
        if x.device.type == "cuda":
            self._compile(x, logits, routing, e_score_correction_bias, plus, beside)
        return mix(
            self, x, logits, routing, e_score_correction_bias, plus, self.choose(x.shape[0], routing.top_k), beside
        )  # fmt: skip

    def choose(self, num_tokens: int, top_k: int) -> ExpertTiles:
        per_expert = num_tokens * top_k / (self.shape.num_routed or self.shape.num_experts)
        return next(tiles for tiles in self._tiles if tiles.max_pairs is None or per_expert <= tiles.max_pairs)

    def _compile(
        self, x: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None, plus: Tensor | None,
        beside: Beside | None,
    ) -> None:  # fmt: skip
        """Run every kernel that any number of tokens will need, once per shape, so that a capture compiles none."""
        key = (
            self.shape,
            self.written,
            routing,
            x.dtype,
            logits.dtype,
            e_score_correction_bias is None,
            plus is None,
            beside is None,
            x.device,
        )
        if key in _compiled:
            return
        _compiled.add(key)
        for num_tokens in TOKENS_OF_EACH_ROUTE:
            route(logits.new_zeros(num_tokens, logits.shape[1]), routing, e_score_correction_bias)
        plus = None if plus is None else torch.zeros_like(plus[:1])
        for choice in self._tiles:
            mix(
                self,
                torch.zeros_like(x[:1]),
                torch.zeros_like(logits[:1]),
                routing,
                e_score_correction_bias,
                plus,
                choice,
                beside,
            )


class TritonExpertWeights(GroupedExpertWeights, StackedExpertWeights):
    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._tiles = tiles_for(dtype, device)

    def product(
        self, half: Half, x: Tensor, routed: Routed, tiles: ProductTiles, added: triton_grouped.Added | None
    ) -> Tensor:
        codes = triton_grouped.plain(self.weights[half])
        return triton_grouped.product(self.shape, half, codes, self.biases[half], x, routed, tiles, added)


def tiles_for(dtype: torch.dtype, device: torch.device) -> tuple[ExpertTiles, ...]:
    by = tuning.of(device).experts
    return by.float32 if dtype == torch.float32 else by.half


_compiled: set[tuple[ExpertShape, object, Routing, torch.dtype, torch.dtype, bool, bool, bool, torch.device]] = set()


def mix(
    experts: GroupedExpertWeights, x: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None,
    plus: Tensor | None, choice: ExpertTiles, beside: Beside | None = None,
) -> Tensor:  # fmt: skip
    """Compute `ops.moe` for at least one token by the chosen kernels."""
    x, logits, plus = x.contiguous(), logits.contiguous(), None if plus is None else plus.contiguous()
    routed, shape = route(logits, routing, e_score_correction_bias), experts.shape
    if not shape.are_all:  # pairs of experts on other devices are neither computed nor read
        routed = routed._replace(starts=routed.starts[shape.first : shape.first + shape.num_experts + 1])
    added = None if beside is None else shrunk(beside.shares("gate_up"), x, routed, by_token=True)
    inner = experts.product("gate_up", x, routed, choice.gate_up, added)
    added = None if beside is None else shrunk(beside.shares("down"), inner, routed, by_token=False)
    parts = experts.product("down", inner, routed, choice.down, added)
    return triton_grouped.add_parts(parts, routed.chosen.experts, shape, plus)
