"""Host tables: the block tables of all rows on the host, in the kernels' block numbers.

They are written in launch order. A table of recurrent states has one entry per row. Uses no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from runtime.batch import ScheduledRow
from runtime.kv.layout import KVLayout

Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Update(NamedTuple):
    """Update of a block table: the entries of `row` from `first_entry` on become `ids`."""

    table: int
    row: int
    first_entry: int
    ids: Sequence[int]


class _Table(NamedTuple):
    """Mapping of pool blocks to entries of a block table. A pool block contains `size` kernel blocks. Next to each are
    `num_sub_slots` - 1 kernel blocks of other layers."""

    table: int
    size: int
    num_sub_slots: int


class TableUpdates:
    """Conversion of new pool blocks to block table updates. `shape`: [tables, max_num_seqs, maximum entries]."""

    def __init__(self, layout: KVLayout, max_num_seqs: int, max_model_len: int) -> None:
        size = layout.block_size // layout.kernel_block_size
        self.shape = layout.num_tables, max_num_seqs, layout.max_entries(max_model_len)
        self._tables: list[list[_Table]] = []  # tables of each group of layers
        for group in layout.groups:
            first = sum(map(len, self._tables))
            tables = range(first, first + group.width)
            self._tables.append(
                [
                    _Table(table, 1, 1) if group.state else _Table(table, size, layout.num_sub_slots[table])
                    for table in tables
                ]
            )

    def of(self, rows: Iterable[ScheduledRow]) -> Iterator[Update]:
        for row in rows:
            for new in row.new_blocks:
                tables = self._tables[new.group]
                for offset, (table, size, num_sub_slots) in enumerate(tables):
                    ids = new.ids if len(tables) == 1 else new.ids[offset :: len(tables)]
                    if size * num_sub_slots > 1:
                        ids = tuple(
                            (block_id * size + each) * num_sub_slots for block_id in ids for each in range(size)
                        )
                    yield Update(table, row.row, new.first_entry * size, ids)


class HostBlockTables:
    """Block tables on the host: `entries` [tables, max_num_seqs, maximum entries] int32."""

    def __init__(self, layout: KVLayout, max_num_seqs: int, max_model_len: int) -> None:
        self._updates = TableUpdates(layout, max_num_seqs, max_model_len)
        self._block_size = layout.kernel_block_size
        self.entries: Int32s = np.zeros(self._updates.shape, np.int32)
        first_state = layout.num_tables - layout.num_state_tables
        self._flat = self.entries[:first_state].reshape(first_state, prod(self.entries.shape[1:]))  # no copy
        self._states = self.entries[first_state:, :, 0]

    def write(self, rows: Iterable[ScheduledRow]) -> None:
        """Write the new blocks of `rows` to the tables."""
        for table, row, first, ids in self._updates.of(rows):
            self.entries[table, row, first : first + len(ids)] = ids

    def slot_mapping(self, token_rows: Int64s, positions: Int64s) -> Int64s:
        """Return KV slots [tables without states, T] of T tokens. `token_rows`, `positions` [T]: row and position of each."""
        entries = positions // self._block_size
        blocks = self._flat.take(token_rows * self.entries.shape[2] + entries, axis=1)
        return (blocks - entries) * self._block_size + positions

    def states(self, rows: Int64s) -> Int64s | tuple[()]:
        """Return the state entries [tables of states, B] of `rows` [B]."""
        return self._states.take(rows, axis=1).astype(np.int64) if len(self._states) else ()
