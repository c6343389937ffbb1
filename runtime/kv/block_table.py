"""Block table: which KV block holds which span of one sequence.

Bookkeeping only; KVCache turns ids into tensors. A table grows only at its tail, so ids already sent to the device stay valid."""

from __future__ import annotations

from collections.abc import Iterable


class BlockTable:
    __slots__ = ("_ids", "block_size", "num_sent")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: list[int] = []
        self.num_sent = 0  # ids that a scheduled batch has already carried to the device

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        return self._ids

    @property
    def num_slots(self) -> int:
        """Tokens that fit without another block."""
        return len(self._ids) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to add before `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self._ids))

    def append(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)

    def take_unsent(self) -> tuple[int, tuple[int, ...]]:
        """(index of the first, ids) of what no batch has carried yet; they count as sent from now on."""
        first = self.num_sent
        self.num_sent = len(self._ids)
        return first, tuple(self._ids[first:])
