"""Adapter slots of all layers of a model.

On a device a slot is contiguous memory for all layers, and so is an adapter on the host: loading it is one copy at memory
speed, instead of hundreds of small ones that would occupy the event loop for milliseconds. The host's buffers are pinned
when the server starts, since pinning may stall a computing device; they are acquired and written on any thread."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ops.lora.share import LoraPart, LoraSlots

_ALIGNMENT = 256
_PINNED_AT_ONCE = 1 << 30  # bytes: torch rounds pinned allocations up to a power of two


@dataclass(slots=True, eq=False)
class _Stretch:
    """Buffer of pinned host memory. `copied`: event after the last copy from it."""

    memory: Tensor
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLora:
    """Adapter ready for a slot: `shares` of layers that store their own slots, and one buffer for all other layers."""

    shares: Mapping[str, Any]
    stretch: _Stretch | None = None


class LoraLayers:
    """LoRA adapters of all layers. `slots`: slots of each layer, by name. Host memory for `num_ready` adapters is pinned at
    start-up; more is allocated per adapter. `changed`: number of loaded adapters that change a layer, for each layer with its own
    slots."""

    def __init__(
        self, slots: Mapping[str, LoraSlots], num_slots: int, device: torch.device, num_ready: int = 0,
        changed: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        self._slots = slots
        self._places: dict[str, slice] = {}
        end = 0
        for name, each in slots.items():
            if each.slot_bytes:
                self._places[name] = slice(end, end + each.slot_bytes)
                end += -(-each.slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(num_slots, end, dtype=torch.uint8, device=device)
        for name, place in self._places.items():
            slots[name].bind(self._memory[:, place])
        self._host = _Host(end, num_ready if end else 0, pinned=device.type == "cuda")
        self._taken: list[frozenset[str]] = [frozenset()] * num_slots  # layers that each slot changes
        self.changed: Counter[str] = Counter() if changed is None else changed

    def prepared(self, parts: Mapping[str, Sequence[LoraPart]]) -> PreparedLora:
        """Prepare an adapter for `put` from its parts by layer. Slow; may be called on any thread."""
        shares = {name: self._slots[name].prepared(some) for name, some in parts.items() if name not in self._places}
        if not self._places:
            return PreparedLora(shares)
        stretch = self._host.take()
        for name, place in self._places.items():
            if name in parts:
                self._slots[name].write(parts[name], stretch.memory[place])
        return PreparedLora(shares, stretch)

    def release(self, adapter: PreparedLora) -> None:
        """Release the host memory of an adapter that will not be loaded again. Slots into which it was loaded are unchanged."""
        if adapter.stretch is not None:
            self._host.give(adapter.stretch)

    def put(self, slot: int, adapter: PreparedLora) -> None:
        """Load an adapter into `slot` from the next step on. Call it in the order of steps."""
        for name in self._taken[slot] - adapter.shares.keys():
            self._slots[name].put(slot, None)
        for name, share in adapter.shares.items():
            self._slots[name].put(slot, share)
        self.changed.subtract(self._taken[slot])
        self._taken[slot] = frozenset(adapter.shares)
        self.changed.update(self._taken[slot])
        if adapter.stretch is not None:
            self._memory[slot].copy_(adapter.stretch.memory, non_blocking=True)
            if self._memory.device.type == "cuda":
                adapter.stretch.copied = torch.cuda.Event()
                adapter.stretch.copied.record()


@dataclass(slots=True)
class _Host:
    num_bytes: int
    num_ready: int
    pinned: bool
    _free: deque[_Stretch] = field(default_factory=deque)  # thread-safe at both ends

    def __post_init__(self) -> None:
        if self.num_bytes and self.pinned:
            at_once = max(1, _PINNED_AT_ONCE // self.num_bytes)
            for first in range(0, self.num_ready, at_once):
                self._free.extend(map(_Stretch, self._allocated(min(at_once, self.num_ready - first))))

    def take(self) -> _Stretch:
        try:
            stretch = self._free.pop()
        except IndexError:
            stretch = _Stretch(self._allocated(1)[0])
        if stretch.copied is not None:
            stretch.copied.synchronize()
        stretch.memory.zero_()
        return stretch

    def give(self, stretch: _Stretch) -> None:
        self._free.append(stretch)

    def _allocated(self, count: int) -> Tensor:
        return torch.empty(count, self.num_bytes, dtype=torch.uint8, pin_memory=self.pinned)
