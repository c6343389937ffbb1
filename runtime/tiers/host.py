"""Host tier: index of the KV entries in host memory, least recently used first. It contains plain data, no tensors.

An entry can be found once all its slots are written. An entry that is held, because a copy reads it, is not evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from runtime.kv.prefix_cache import BlockHash

Key: TypeAlias = tuple[int, BlockHash]  # the index of a group of layers, and the entry's name
Slots: TypeAlias = tuple[int, ...]  # as many as the group is wide


class HostMemory(Protocol):
    """Memory of the slots, `slot_bytes` each. Its methods are called on threads that copy blocks."""

    slot_bytes: int

    def rows(self, slots: Sequence[int]) -> Sequence[Any]:
        """Return the slots in order, as a list of tensors [n, slot_bytes] uint8. Each tensor has n adjacent slots."""
        ...

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the memory of each slot, as writable views."""
        ...


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._entries: OrderedDict[Key, Slots] = OrderedDict()
        self._holds: Counter[Key] = Counter()
        self._free: list[int] = []
        self._num_new = num_slots  # slots that were never used: they cost no memory yet

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_used(self) -> int:
        """Number of slots in use, including slots that are being written."""
        return self.num_slots - self._num_new - len(self._free)

    def take(self, num: int) -> Slots | None:
        """Return `num` slots to be written, evicting the least recently used entries. Return None if too many entries are held."""
        while len(self._free) + self._num_new < num:
            oldest = next((key for key in self._entries if not self._holds[key]), None)
            if oldest is None:
                return None
            self.give_back(self._entries.pop(oldest))
        taken = [self._free.pop() for _ in range(min(num, len(self._free)))]
        first = self.num_slots - self._num_new
        self._num_new -= num - len(taken)
        return (*taken, *range(first, first + num - len(taken)))

    def give_back(self, slots: Sequence[int]) -> None:
        """Free `slots`, which must belong to no entry."""
        self._free += reversed(slots)

    def put(self, key: Key, slots: Slots) -> None:
        """Add the entry `key`, whose slots have been written. If the key already has an entry, free `slots` instead."""
        if key in self._entries:
            self.give_back(slots)
        else:
            self._entries[key] = slots

    def clear(self) -> None:
        """Remove all entries that are not held."""
        for key in [key for key in self._entries if not self._holds[key]]:
            self.give_back(self._entries.pop(key))

    def hold(self, key: Key) -> Slots:
        """Return the slots of the entry `key`, and protect it from eviction until `release` is called. It becomes the most
        recently used."""
        self._holds[key] += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def release(self, key: Key) -> None:
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
