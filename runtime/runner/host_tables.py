"""Host tables: the block tables of every row, one for each of a step's tables, as the kernels count blocks.

Written in launch order, like everything a step reads; tells in which slots tokens go. Knows numbers, no device."""

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


class HostTables:
    """`entries` [num_tables, max_num_seqs, entries of the longest context] int32."""

    def __init__(self, layout: KVLayout, max_num_seqs: int, max_model_len: int) -> None:
        self._block_size = layout.block_size
        self.entries: Words = np.zeros(
            (layout.num_tables, max_num_seqs, -(-max_model_len // layout.block_size)), np.int32
        )
        self._flat = self.entries.reshape(layout.num_tables, -1)  # the same memory
        parts = layout.parts
        self._tables: list[list[tuple[int, int]]] = []  # of each group: its tables, and the parts of a block there
        for group in layout.groups:
            first = sum(map(len, self._tables))
            self._tables.append([(table, parts[table]) for table in range(first, first + group.width)])

    def write(self, rows: Iterable[ScheduledRow]) -> Iterator[Update]:
        """What `rows` bring, entered as it is told: take all of it."""
        for row in rows:
            for new in row.new_blocks:
                tables = self._tables[new.group]
                for offset, (table, parts) in enumerate(tables):
                    ids = new.ids if len(tables) == 1 else new.ids[offset :: len(tables)]
                    if parts > 1:
                        ids = tuple(block_id * parts for block_id in ids)
                    self.entries[table, row.row, new.first_entry : new.first_entry + len(ids)] = ids
                    yield Update(table, row.row, new.first_entry, ids)

    def slots(self, token_rows: Words | Longs, positions: Words | Longs) -> Words:
        """[num_tables, T]: where tokens of these rows and positions, both [T], are stored; wide as the wider of the two."""
        entries = token_rows * self.entries.shape[2] + positions // self._block_size
        return self._flat.take(entries, axis=1) * self._block_size + positions % self._block_size
