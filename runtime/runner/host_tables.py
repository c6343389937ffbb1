"""Host tables: the block tables of every row, one for each of a step's tables, as the kernels count blocks.

Written in launch order, like everything a step reads; tells in which slots tokens go and states lie. A table of states has one
entry a row. Knows numbers, no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from runtime.batch import ScheduledRow
from runtime.kv.layout import KVLayout

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Update(NamedTuple):
    """`ids` of `table`'s entries for `row`, from `first_entry` on."""

    table: int
    row: int
    first_entry: int
    ids: tuple[int, ...]


class _Table(NamedTuple):
    """A block of the pool is `size` blocks of a layer as kernels count them, each beside those of `parts` - 1 other layers."""

    table: int
    size: int
    parts: int


class HostTables:
    """`entries` [num_tables, max_num_seqs, entries of the longest context] int32."""

    def __init__(self, layout: KVLayout, max_num_seqs: int, max_model_len: int) -> None:
        self._block_size = layout.kernel_block_size
        size = layout.block_size // layout.kernel_block_size
        num_entries = -(-max_model_len // layout.block_size) * size
        self.entries: Words = np.zeros((layout.num_tables, max_num_seqs, num_entries), np.int32)
        self.first_state = layout.num_tables - layout.num_state_tables
        self._flat = self.entries[: self.first_state].reshape(self.first_state, max_num_seqs * num_entries)  # no copy
        self._states = self.entries[self.first_state :, :, 0]
        self._tables: list[list[_Table]] = []  # of each group
        for group in layout.groups:
            first = sum(map(len, self._tables))
            tables = range(first, first + group.width)
            self._tables.append(
                [_Table(table, 1, 1) if group.state else _Table(table, size, layout.parts[table]) for table in tables]
            )

    def write(self, rows: Iterable[ScheduledRow]) -> Iterator[Update]:
        """What `rows` bring, entered as it is told: take all of it."""
        for row in rows:
            for new in row.new_blocks:
                tables = self._tables[new.group]
                for offset, (table, size, parts) in enumerate(tables):
                    ids = new.ids if len(tables) == 1 else new.ids[offset :: len(tables)]
                    if size * parts > 1:
                        ids = tuple((block_id * size + each) * parts for block_id in ids for each in range(size))
                    first = new.first_entry * size
                    self.entries[table, row.row, first : first + len(ids)] = ids
                    yield Update(table, row.row, first, ids)

    def slots(self, token_rows: Words | Longs, positions: Words | Longs) -> Words:
        """[tables of no states, T]: where tokens of these rows and positions, both [T], are stored.

        Wide as the wider of the two."""
        entries = token_rows * self.entries.shape[2] + positions // self._block_size
        return self._flat.take(entries, axis=1) * self._block_size + positions % self._block_size

    def states(self, rows: Words | Longs) -> Words:
        """[tables of states, L]: where the states of these rows [L] lie."""
        return self._states.take(rows, axis=1)
