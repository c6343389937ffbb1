"""Host memory for the slots of the host tier, allocated in slabs as slots are first used. It is page-locked if a device needs
it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_SLAB_BYTES = 256 << 20


class Slabs:
    """Slots of `slot_bytes` bytes each in host memory. Thread-safe. Allocating page-locked memory is slow, so call the methods
    on threads other than the event loop's."""

    def __init__(self, slot_bytes: int, num_slots: int, *, page_locked: bool) -> None:
        self.slot_bytes = slot_bytes
        self._slab_slots = min(num_slots, max(1, _SLAB_BYTES // slot_bytes))
        self._page_locked = page_locked
        self._slabs: dict[int, Tensor] = {}
        self._lock = Lock()

    def rows(self, slots: Sequence[int]) -> list[Tensor]:
        """Return the slots in order, as a list of tensors [n, slot_bytes] uint8. Each tensor has n adjacent slots."""
        runs = groupby(enumerate(slots), key=lambda place: (place[1] - place[0], place[1] // self._slab_slots))
        found = []
        for (_, number), members in runs:
            in_slab = [slot % self._slab_slots for _, slot in members]
            found.append(self._slab(number)[in_slab[0] : in_slab[-1] + 1])
        return found

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the memory of each slot, as writable views."""
        arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = [
            self._slab(slot // self._slab_slots)[slot % self._slab_slots].numpy() for slot in slots
        ]
        return [array.data for array in arrays]

    def _slab(self, number: int) -> Tensor:
        import torch

        with self._lock:
            if number not in self._slabs:
                shape = self._slab_slots, self.slot_bytes
                self._slabs[number] = torch.empty(*shape, dtype=torch.uint8, pin_memory=self._page_locked)
            return self._slabs[number]
