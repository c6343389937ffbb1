"""Block table: ids of the KV blocks of one sequence in one group of layers, in order of token position.

The table contains ids only; `KVCache` maps them to tensors. It grows only at its tail, so ids that were sent to the device stay
valid. If the group has a window, blocks that no later query reads are freed at the table's head. `num_reserved` counts blocks
that are reserved for the sequence and not yet allocated. The group's memory kind defines the content and the number of entries.
An entry has as many block ids as the group's `width`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runtime.kv.block_pool import BlockIds
from runtime.kv.layout import LayerGroup


class NewBlocks(NamedTuple):
    """Block ids added to a table: those of its entries from index `first_entry` on. `group`: index of the table's layer group."""

    group: int
    first_entry: int
    ids: Sequence[int]


class BlockTable:
    """Block table of one sequence, created empty. `start`: first token that will be computed."""

    __slots__ = ("_block_size", "_ids", "_num_sent", "first_entry", "group", "num_reserved", "num_slots")

    def __init__(self, block_size: int, group: LayerGroup, start: int = 0) -> None:
        self._block_size = block_size
        self.group = group
        self.first_entry = self._first_in_window(start)
        self._ids: BlockIds = array("i")
        self.num_slots = self._num_slots()  # tokens that fit without another block
        self.num_reserved = 0  # blocks of the pool that will be its next
        self._num_sent = 0  # of the ids, those that a scheduled batch has carried to the device

    def _first_in_window(self, position: int) -> int:
        kind = self.group.kind
        return kind.first_in_window(position) // kind.entry_tokens(self._block_size)

    @property
    def _num_entries(self) -> int:
        return self.first_entry + len(self._ids) // self.group.width

    def _num_slots(self) -> int:
        return self.group.kind.num_tokens(self._num_entries, self._block_size)

    @property
    def ids(self) -> BlockIds:
        """Block ids of all entries that the table has, starting with entry `first_entry`."""
        return self._ids

    def entry_ids(self, start: int, end: int) -> BlockIds:
        """Block ids of entries [start, end)."""
        width = self.group.width
        return self._ids[(start - self.first_entry) * width : (end - self.first_entry) * width]

    def num_missing(self, num_tokens: int) -> int:
        """Return the number of block ids to append before the table covers the sequence's first `num_tokens` tokens."""
        missing = self.group.kind.num_entries(num_tokens, self._block_size) - self._num_entries
        return max(0, missing) * self.group.width

    def append(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)
        self.num_slots = self._num_slots()

    def replace(self, ids: Iterable[int]) -> BlockIds:
        """Replace all block ids of the table by `ids`, which the next batch sends to the device. Return the previous ids."""
        replaced, self._ids, self._num_sent = self._ids, array("i", ids), 0
        return replaced

    def take_out_of_window(self, position: int) -> BlockIds:
        """Remove and return the block ids that no query at or after `position` reads."""
        first_entry = self._first_in_window(position)
        if first_entry <= self.first_entry:
            return array("i")
        num = (first_entry - self.first_entry) * self.group.width
        out_of_window = self._ids[:num]
        del self._ids[:num]
        self.first_entry = first_entry
        self._num_sent -= num
        return out_of_window

    def take_unsent(self) -> tuple[int, BlockIds]:
        """Return (index of their first entry, block ids) for the ids that were not yet sent to the device. Mark these ids as
        sent."""
        first = self._num_sent
        self._num_sent = len(self._ids)
        return self.first_entry + first // self.group.width, self._ids[first:]
