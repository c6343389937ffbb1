"""Block table: KV blocks of one sequence in one group of layers, by position.

Bookkeeping only; KVCache maps ids to tensors. A table grows only at its tail, so ids already sent to the device stay valid.
A group with a window frees blocks at its head that no later query reads. `num_reserved` counts blocks that are reserved for
the sequence and not yet allocated. The group's memory kind defines the content and the number of entries; an entry has one
id per layer of a block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runtime.kv.block_pool import BlockIds
from runtime.kv.layout import LayerGroup


class NewBlocks(NamedTuple):
    """Blocks `ids` of the entries from `first_entry` on, in the table of group number `group`."""

    group: int
    first_entry: int
    ids: Sequence[int]


class BlockTable:
    """An empty table for a sequence that will be computed from token `start` on."""

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
        """The entry of the first token that a query at `position` sees."""
        kind = self.group.kind
        return kind.first_in_window(position) // kind.entry_tokens(self._block_size)

    @property
    def _num_entries(self) -> int:
        """Number of entries, with those at the head that it never had, or has no more."""
        return self.first_entry + len(self._ids) // self.group.width

    def _num_slots(self) -> int:
        return self.group.kind.num_tokens(self._num_entries, self._block_size)

    @property
    def ids(self) -> BlockIds:
        """Block ids from the first entry on."""
        return self._ids

    def entry_ids(self, start: int, end: int) -> BlockIds:
        """Block ids of entries [start, end)."""
        width = self.group.width
        return self._ids[(start - self.first_entry) * width : (end - self.first_entry) * width]

    def num_missing(self, num_tokens: int) -> int:
        """Ids to add before `num_tokens` tokens fit."""
        missing = self.group.kind.num_entries(num_tokens, self._block_size) - self._num_entries
        return max(0, missing) * self.group.width

    def append(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)
        self.num_slots = self._num_slots()

    def replace(self, ids: Iterable[int]) -> BlockIds:
        """Other blocks in the place of all that it has, of which the next batch has to tell the device; those that it had."""
        replaced, self._ids, self._num_sent = self._ids, array("i", ids), 0
        return replaced

    def take_out_of_window(self, position: int) -> BlockIds:
        """Ids that no query at `position` or behind it sees; the table has them no more."""
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
        """Return (index of the first entry, ids) of the blocks that no batch has carried yet. They count as sent afterwards."""
        first = self._num_sent
        self._num_sent = len(self._ids)
        return self.first_entry + first // self.group.width, self._ids[first:]
