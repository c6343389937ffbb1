"""Host tier: which KV entries lie in which slots of host memory, least recently used first. Plain data, no tensors.

An entry can be found once all of its slots are written. One that is held, because somebody copies it, is not evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from runtime.kv.prefix_cache import BlockHash

Key: TypeAlias = tuple[int, BlockHash]  # the index of a group of layers, and the entry's name
Slots: TypeAlias = tuple[int, ...]  # as many as the group is wide


class HostMemory(Protocol):
    """The memory behind slots of `slot_bytes` each. Called on threads that copy."""

    slot_bytes: int

    def rows(self, slots: Sequence[int]) -> Sequence[Any]:
        """Return the slots in order, as tensors [n, slot_bytes] uint8 of neighbouring ones."""
        ...

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the bytes of each slot."""
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
        """Slots in use, including those that are being written."""
        return self.num_slots - self._num_new - len(self._free)

    def take(self, num: int) -> Slots | None:
        """Return `num` slots to be written, at the cost of the least recently used entries; None where too many are held."""
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
        """Free slots that hold no entry."""
        self._free += reversed(slots)

    def put(self, key: Key, slots: Slots) -> None:
        """Note that an entry has been written. The first one of a key stays."""
        if key in self._entries:
            self.give_back(slots)
        else:
            self._entries[key] = slots

    def clear(self) -> None:
        """Forget all entries that are not held."""
        for key in [key for key in self._entries if not self._holds[key]]:
            self.give_back(self._entries.pop(key))

    def hold(self, key: Key) -> Slots:
        """Return the slots of an entry, which stays until it is released, as the most recently used one."""
        self._holds[key] += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def release(self, key: Key) -> None:
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
