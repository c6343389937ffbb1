"""Encoder cache: encoder outputs in device memory, by content key, with least-recently-used eviction.

Counts outputs instead of bytes, since all outputs of an encoder have one size. Outputs that a chunk still needs are pinned.
Contains keys and sequence numbers only, no tensors and no media."""

from __future__ import annotations

from typing import TypeAlias

Holder: TypeAlias = tuple[int, int]  # number of a sequence, and the position of the item in it


class EncoderCache:
    """Encoder outputs on the device, by key. `capacity`: number of outputs that fit."""

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
        """Protect outputs from eviction for `holder`. They exist, or are being computed."""
        self._sizes[key] = self._sizes.pop(key)
        self._holders.setdefault(key, set()).add(holder)

    def is_held_by(self, key: bytes, holder: Holder) -> bool:
        return holder in self._holders.get(key, ())

    def release(self, key: bytes, holder: Holder) -> None:
        """End the protection of outputs for `holder`, if there was one."""
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                del self._holders[key]

    def add(self, key: bytes, size: int) -> bool:
        """Evict outputs to make space for `size` outputs of a new key. Return False if protected outputs leave too little."""
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
        """Remove outputs that no longer exist, if they were present."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_used -= size
            self._holders.pop(key, None)
            self._dropped.append(key)

    def clear(self) -> None:
        for key in list(self._sizes):
            self.forget(key)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys evicted since the last call. The device drops their outputs before its next encoder runs."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped
