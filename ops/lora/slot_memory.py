"""Adapter slots of a layer in device memory, in the layout of kernels: matrices padded to one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters

_LEAST_RANK = 16  # minimum for a matrix product
_ALIGNMENT = 16  # in bytes, of a slot's tensors


class Slots(NamedTuple):
    """View of one or all slots of a layer: a [..., parts, rank, K], b [..., N, rank], scale [..., parts] float32. Slots are
    at equal distances."""

    a: Tensor
    b: Tensor
    scale: Tensor

    @property
    def stride(self) -> int:
        """Distance between two slots, in units of 16 bytes."""
        return self.a.stride(0) * self.a.itemsize // 16


class SlotMemory(LoraSlots):
    """Slots in one block of device memory. `dtype`: of activations and of the stored numbers."""

    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape)
        self._dtype, self._device = dtype, device
        self._rank = max(_LEAST_RANK, 1 << (shape.max_rank - 1).bit_length())
        num_parts = len(shape.parts)
        self._starts = [sum(shape.parts[:part]) for part in range(num_parts)]
        self._sizes = num_parts * self._rank * shape.in_features, shape.out_features * self._rank
        used = sum(self._sizes) * dtype.itemsize + 4 * num_parts
        self.slot_bytes = -(-used // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = shape.num_slots * self.slot_bytes
        self._bound: Slots | None = None

    def bind(self, memory: Tensor) -> None:
        self._bound = self._views(memory)

    def _views(self, memory: Tensor) -> Slots:
        """View memory [..., slot_bytes] uint8, whose last dim is contiguous, as slots."""
        of_a, of_b = (size * self._dtype.itemsize for size in self._sizes)
        num_parts, lead = len(self.shape.parts), memory.shape[:-1]
        a = memory[..., :of_a].view(self._dtype).view(*lead, num_parts, self._rank, self.shape.in_features)
        b = memory[..., of_a : of_a + of_b].view(self._dtype).view(*lead, self.shape.out_features, self._rank)
        return Slots(a, b, memory[..., of_a + of_b : of_a + of_b + 4 * num_parts].view(torch.float32))

    @property
    def slots(self) -> Slots:
        """Return the slots of all adapters."""
        if self._bound is None:  # no memory was bound
            size = self.shape.num_slots, self.slot_bytes
            self.bind(torch.zeros(size, dtype=torch.uint8, device=self._device))
        assert self._bound is not None
        return self._bound

    def prepared(self, parts: Sequence[LoraPart]) -> Tensor:
        memory = torch.zeros(self.slot_bytes, dtype=torch.uint8)
        self.write(parts, memory)
        return memory

    def write(self, parts: Sequence[LoraPart], memory: Tensor) -> None:
        """Write a whole slot, padding included, so that no data of the previous adapter remains."""
        a, b, scale = self._views(memory)
        for part in parts:
            stop = part.start + len(part.b)
            for place, start in enumerate(self._starts):
                if part.start <= start < stop:  # an adapter may change several of the layer's parts with one A
                    a[place, : part.rank] = part.a
                    scale[place] = part.scale
            b[part.start : stop, : part.rank] = part.b

    def put(self, slot: int, share: Tensor | None) -> None:
        if share is None:
            self.slots.scale[slot].zero_()
            return
        for ours, given in zip(self.slots, self._views(share), strict=True):
            ours[slot].copy_(given)


class ExpertSlots(SlotMemory):
    """Slots of one matrix of one expert. The kernels of the experts' products add them (`ops.moe.weights.ExpertShares`)."""

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        raise TypeError("adapters of experts are added where experts are multiplied")
