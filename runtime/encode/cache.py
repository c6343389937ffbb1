"""Encoder cache: encoder outputs in device memory, by content hash, with least-recently-used eviction.

Sizes are numbers of outputs instead of bytes, since all outputs of an encoder have one size. Outputs that a prompt chunk still
needs are protected from eviction. The cache contains keys and sequence numbers only, no tensors and no media."""

from __future__ import annotations

from typing import TypeAlias

Holder: TypeAlias = tuple[int, int]  # number of a sequence, and the position of the item in it


class EncoderCache:
    """Index of the encoder outputs on the device, by key. `capacity`: number of outputs that fit."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_used = 0
        self._sizes: dict[bytes, int] = {}  # in LRU order
        self._holders: dict[bytes, set[Holder]] = {}  # of protected outputs
        self._dropped: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def hold(self, key: bytes, holder: Holder) -> None:
        """Protect the outputs of `key` from eviction until `holder` releases them. The key must have been added."""
        self._sizes[key] = self._sizes.pop(key)
        self._holders.setdefault(key, set()).add(holder)

    def is_held_by(self, key: bytes, holder: Holder) -> bool:
        return holder in self._holders.get(key, ())

    def release(self, key: bytes, holder: Holder) -> None:
        """End the protection of the outputs of `key` by `holder`, if there is any."""
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                del self._holders[key]

    def add(self, key: bytes, size: int) -> bool:
        """Add `key` with `size` outputs, evicting others if needed. Return False and change nothing if protected outputs leave too
        little space."""
        free = self.capacity - self.num_used
        going: list[bytes] = []
        for other, other_size in self._sizes.items():
            if free >= size:
                break
            if other not in self._holders:
                going.append(other)
                free += other_size
        if free < size:
            return False
        for other in going:
            self.forget(other)
        self._sizes[key] = size
        self.num_used += size
        return True

    def forget(self, key: bytes) -> None:
        """Remove the outputs of `key`, which are invalid, if they are in the cache."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_used -= size
            self._holders.pop(key, None)
            self._dropped.append(key)

    def clear(self) -> None:
        for key in list(self._sizes):
            self.forget(key)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys that were removed since the last call. The device frees their outputs before its next encoder run."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped
