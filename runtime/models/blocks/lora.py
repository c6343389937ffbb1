"""Layers with LoRA slots: add the output of each token's adapter to the output of the weight.

`of(adapters)` returns the layer for the adapters of a step. Without adapters it computes only the product with the weight."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from torch import Tensor

import ops
from ops.lora.slot_memory import ExpertSlots
from ops.moe.weights import Beside, ExpertShares, Half
from ops.symbols import Symbol


class LoraLinear(ops.LinearWeight):
    def __init__(
        self, weight: ops.LinearWeight, slots: ops.LoraSlots, adapters: ops.TokenAdapters | None = None
    ) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.slots = slots
        self._weight, self._adapters = weight, adapters

    def of(self, adapters: ops.TokenAdapters | None) -> LoraLinear:
        return self if adapters is None else LoraLinear(self._weight.of(adapters), self.slots, adapters)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._weight.nbytes + self.slots.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        adapters = self._adapters
        if isinstance(x, Symbol):
            out = self._weight.matmul(x)
            assert isinstance(out, Symbol)
            self.slots.trace(x, out)
            return out
        if adapters is None:
            return self._weight.matmul(x)
        if (whole := self._plus(x, adapters, gated=False)) is not None:
            return whole
        begun = self.slots.begin(x, adapters)
        out = self._weight.matmul(x)
        self.slots.add(x, adapters, out, begun)
        return out

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        adapters = self._adapters
        if isinstance(x, Symbol):
            return None
        if adapters is None:
            return self._weight.gated_matmul(x)
        if (whole := self._plus(x, adapters, gated=True)) is not None:
            return whole
        begun = self.slots.begin(x, adapters)
        gate_up = self._weight.matmul(x)
        gated = self.slots.gated(x, adapters, gate_up, begun)
        if gated is None:
            self.slots.add(x, adapters, gate_up, begun)
            gated = ops.silu_mul(gate_up)
        return gated

    def _plus(self, x: Tensor, adapters: ops.TokenAdapters, *, gated: bool) -> Tensor | None:
        """Return the product of x with weight and adapters by a single kernel; None if no kernel supports it."""
        if not self._weight.takes_low_rank(len(x), gated=gated):
            return None
        low = self.slots.low_rank(x, adapters, gated=gated)
        return None if low is None else self._weight.matmul_plus(x, low, gated=gated)

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight without adapters: adapters of the head do not change an embedding with the same weight."""
        return self._weight.rows(ids)


class LoraEmbedding(ops.LinearWeight):
    """Embedding with adapter slots. If it is also the head, the slots do not affect its logits."""

    def __init__(
        self, weight: ops.LinearWeight, slots: ops.LoraSlots, adapters: ops.TokenAdapters | None = None
    ) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._weight, self._slots, self._adapters = weight, slots, adapters

    def of(self, adapters: ops.TokenAdapters | None) -> LoraEmbedding:
        return self if adapters is None else LoraEmbedding(self._weight.of(adapters), self._slots, adapters)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._weight.nbytes + self._slots.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return self._weight.matmul(x)

    def rows(self, ids: Tensor) -> Tensor:
        out = self._weight.rows(ids)
        if self._adapters is not None:
            self._slots.add(ids, self._adapters, out)
        return out

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)


class LoraExperts(ops.ExpertWeights):
    """Experts of a layer with LoRA slots, one set of slots for each matrix of each expert.

    `slots`: by half ("gate_up" or "down") and expert number, with the name that adapters use. On a device all slots are one
    allocation with equal strides between experts. `changed`: number of loaded adapters that change a matrix, by its name;
    updated by the caller."""

    def __init__(
        self,
        weights: ops.ExpertWeights,
        slots: Mapping[tuple[Half, int], tuple[str, ops.LoraSlots]],
        changed: Mapping[str, int],
    ) -> None:
        self.shape = weights.shape
        self._weights, self._slots, self._changed = weights, slots, changed
        self._names = frozenset(name for name, _ in slots.values())
        self._on_device = any(isinstance(each, ExpertSlots) for _, each in slots.values())
        self._adapters: ops.TokenAdapters | None = None

    def of(self, adapters: ops.TokenAdapters | None) -> LoraExperts:
        if adapters is None:
            return self
        bound = copy(self)
        bound._adapters = adapters
        return bound

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._weights.nbytes

    def fill(self, half: Half, expert: int, stored: ops.Stored) -> None:
        self._weights.fill(half, expert, stored)

    def mix(
        self, x: Tensor, logits: Tensor, routing: ops.Routing, e_score_correction_bias: Tensor | None, plus: Tensor | None,
        beside: Beside | None = None,
    ) -> Tensor:  # fmt: skip
        assert beside is None, "adapters are all that is added"
        is_changed = self._adapters is not None and (
            self._on_device or any(self._changed.get(name) for name in self._names)
        )
        return self._weights.mix(x, logits, routing, e_score_correction_bias, plus, self if is_changed else None)

    def shares(self, half: Half) -> ExpertShares:
        assert self._adapters is not None
        (_, first), (_, second) = self._slots[half, 0], self._slots.get((half, 1), self._slots[half, 0])
        assert isinstance(first, ExpertSlots)
        assert isinstance(second, ExpertSlots)
        stride = second.slots.a.data_ptr() - first.slots.a.data_ptr()
        return ExpertShares(self._adapters.slots, *first.slots, stride)

    def add(self, half: Half, expert: int, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        name, slots = self._slots[half, expert]
        if self._changed.get(name):
            assert self._adapters is not None
            slots.add(x, ops.TokenAdapters(self._adapters.slots[tokens]), out)
