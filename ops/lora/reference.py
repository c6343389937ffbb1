"""LoRA in plain torch: the tokens of each adapter are gathered and multiplied. The host counts them, so graphs cannot capture
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters


class ReferenceLoraSlots(LoraSlots):
    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape)
        self._dtype, self._device = dtype, device
        self._shares: dict[int, list[LoraPart]] = {}

    def prepared(self, parts: Sequence[LoraPart]) -> list[LoraPart]:
        return [
            LoraPart(part.start, part.a.to(self._device, self._dtype), part.b.to(self._device, self._dtype), part.scale)
            for part in parts
        ]

    def put(self, slot: int, share: list[LoraPart] | None) -> None:
        self._shares.pop(slot, None)
        if share is not None:
            self._shares[slot] = share

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        slots = adapters.slots[: len(x)]
        for slot in sorted({*slots.tolist()} & self._shares.keys()):
            tokens = (slots == slot).nonzero().flatten()
            rows = x[tokens]
            for part in self._shares[slot]:
                added = ((rows.to(self._dtype) @ part.a.T) * part.scale) @ part.b.T
                out[:, part.start : part.start + len(part.b)].index_add_(0, tokens, added.to(out.dtype))
