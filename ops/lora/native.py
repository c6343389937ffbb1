"""Adapters by oneloop_native: each share packed once, in the type that it came in; sums are float32, the same whatever stands
beside a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops import native as built
from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters
from ops.native import module as native
from ops.registry import ShapeClass
from ops.symbols import Symbol


def supports(case: ShapeClass) -> str | None:
    return built.supports(case) or built.lacks("LoraSlots")


class NativeLoraSlots(LoraSlots):
    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape)
        self._slots: Any = native.LoraSlots(shape.out_features, shape.in_features, shape.num_slots)

    def prepared(self, parts: Sequence[LoraPart]) -> Any:
        """What all parts shrink by is one matrix, so that x is read once."""
        types = {part.a.dtype for part in parts}
        dtype = types.pop() if len(types) == 1 else torch.float32
        if self.shape.narrow and dtype == torch.float32:
            dtype = torch.bfloat16
        shrink = native.PackedLinear(torch.cat([part.a.to(dtype) for part in parts]))
        made, offset = [], 0
        for part in parts:
            made.append((native.PackedLinear(part.b.to(dtype).contiguous()), part.start, offset, part.scale))
            offset += part.rank
        return native.LoraShare(shrink, made, self.shape.out_features)

    def put(self, slot: int, share: Any | None) -> None:
        self._slots.put(slot, share)

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        self._slots.add(x, adapters.slots, out)

    def trace(self, x: Symbol, out: Symbol) -> None:
        x.program.lora(self._slots, x.register, out.register)
