"""A linear layer with room for adapters: what the adapter of each of a step's tokens adds, beside what the weight gives.

Blocks do not know of it: they multiply by it as by any weight, always with all of a step's tokens in their order. Which token has
which adapter is told to the layers once a step (`StepAdapters`)."""

from __future__ import annotations

from torch import Tensor

import ops
from ops.symbols import Symbol


class StepAdapters:
    """The adapters of the step under way, for all layers of a model; None where no token has one."""

    current: ops.TokenAdapters | None = None


class LoraLinear(ops.LinearWeight):
    def __init__(self, weight: ops.LinearWeight, slots: ops.LoraSlots, step: StepAdapters) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.slots = slots
        self._weight, self._step = weight, step

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._weight.nbytes + self.slots.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        out = self._weight.matmul(x)
        if isinstance(x, Symbol):
            assert isinstance(out, Symbol)
            self.slots.trace(x, out)
        elif self._step.current is not None:
            self.slots.add(x, self._step.current, out)
        return out

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        return self._weight.gated_matmul(x) if self._step.current is None and not isinstance(x, Symbol) else None

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a matrix with adapters is no embedding")
