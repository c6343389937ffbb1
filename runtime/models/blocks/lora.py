"""A linear layer with room for adapters: what the adapter of each of a step's tokens adds, beside what the weight gives.

Blocks do not know of it: they multiply by it as by any weight, always with the tokens that `StepAdapters` has been given."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

import ops
from ops.lora.slot_memory import ExpertSlots
from ops.moe.weights import Beside, ExpertShares, Half
from ops.symbols import Symbol


class StepAdapters:
    """The adapters of the tokens that are being computed, in their order, for all layers of a model; None where no token has one.
    `changed`: layers, by name, and how many slots hold an adapter that changes them; of experts alone."""

    current: ops.TokenAdapters | None = None
    changed: Mapping[str, int] = MappingProxyType({})


class LoraLinear(ops.LinearWeight):
    def __init__(self, weight: ops.LinearWeight, slots: ops.LoraSlots, step: StepAdapters) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.slots = slots
        self._weight, self._step = weight, step

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._weight.nbytes + self.slots.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        adapters = self._step.current
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
        adapters = self._step.current
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
        """By a product that adds what adapters do where it ends, if there is one."""
        if not self._weight.takes_low_rank(len(x), gated=gated):
            return None
        low = self.slots.low_rank(x, adapters, gated=gated)
        return None if low is None else self._weight.matmul_plus(x, low, gated=gated)

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)

    def rows(self, ids: Tensor) -> Tensor:
        """As they are: what adapters add to a head they do not add to an embedding that it is."""
        return self._weight.rows(ids)


class LoraEmbedding(ops.LinearWeight):
    """An embedding with room for adapters; as a head, which it may be, too, it is what it was."""

    def __init__(self, weight: ops.LinearWeight, slots: ops.LoraSlots, step: StepAdapters) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._weight, self._slots, self._step = weight, slots, step

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._weight.nbytes + self._slots.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return self._weight.matmul(x)

    def rows(self, ids: Tensor) -> Tensor:
        out = self._weight.rows(ids)
        if self._step.current is not None:
            self._slots.add(ids, self._step.current, out)
        return out

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)


class LoraExperts(ops.ExpertWeights):
    """Experts of a layer with room for adapters, each half of each expert its own. `slots`: by half and expert, each with the name
    by which adapters know it; on a device all are one stretch of memory, in which experts are equally far from each other."""

    def __init__(
        self,
        weights: ops.ExpertWeights,
        slots: Mapping[tuple[Half, int], tuple[str, ops.LoraSlots]],
        step: StepAdapters,
    ) -> None:
        self.shape = weights.shape
        self._weights, self._slots, self._step = weights, slots, step
        self._names = frozenset(name for name, _ in slots.values())
        self._on_device = any(isinstance(each, ExpertSlots) for _, each in slots.values())

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
        is_changed = self._step.current is not None and (
            self._on_device or any(self._step.changed.get(name) for name in self._names)
        )
        return self._weights.mix(x, logits, routing, e_score_correction_bias, plus, self if is_changed else None)

    def shares(self, half: Half) -> ExpertShares:
        """See `Beside`."""
        assert self._step.current is not None
        (_, first), (_, second) = self._slots[half, 0], self._slots.get((half, 1), self._slots[half, 0])
        assert isinstance(first, ExpertSlots)
        assert isinstance(second, ExpertSlots)
        stride = second.slots.a.data_ptr() - first.slots.a.data_ptr()
        return ExpertShares(self._step.current.slots, *first.slots, stride)

    def add(self, half: Half, expert: int, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        """See `Beside`."""
        name, slots = self._slots[half, expert]
        if self._step.changed.get(name):
            assert self._step.current is not None
            slots.add(x, ops.TokenAdapters(self._step.current.slots[tokens]), out)
