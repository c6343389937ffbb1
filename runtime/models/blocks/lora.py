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
        adapters = self._step.current
        if isinstance(x, Symbol):
            out = self._weight.matmul(x)
            assert isinstance(out, Symbol)
            self.slots.trace(x, out)
            return out
        if adapters is None:
            return self._weight.matmul(x)
        begun = self.slots.begin(x, adapters)
        out = self._weight.matmul(x)
        self.slots.finish(begun, adapters, out)
        return out

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        adapters = self._step.current
        if isinstance(x, Symbol):
            return None
        if adapters is None:
            return self._weight.gated_matmul(x)
        begun = self.slots.begin(x, adapters)
        gate_up = self._weight.ungated_matmul(x)
        gated = self.slots.finish_gated(begun, adapters, gate_up)
        if gated is None:
            self.slots.finish(begun, adapters, gate_up)
            gated = ops.silu_mul(gate_up)
        return gated

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a matrix with adapters is no embedding")
