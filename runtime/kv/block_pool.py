"""Block pool: free blocks, reservations, and a reference count of each block.

Invariant: a block with count 0 is in exactly one of two free lists, and reservations never exceed the number of free blocks. The
first list has blank blocks, whose content is useless. They are allocated first, the last released block first. The second list has
cached blocks, which are allocated after them, least recently used first. A reservation is a number and not a set of blocks, so
cached blocks stay available for hits until they are allocated. The pool contains ids only: no hashes, no tensors.

A long prompt allocates and frees thousands of blocks on the event loop. Large operations therefore use numpy; small ones do not.
A prefix hit removes blocks from the middle of the cached list, so the list is a log of releases. An entry is valid while its
position equals the block's position in `_places`. Invalid entries are skipped. They are removed once the list is twice as long
as the pool."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

BlockIds: TypeAlias = "array[int]"  # of type "i"
Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

MANY = 32  # from so many on numpy costs less than a loop
_NOWHERE = -1


class Cached(Protocol):
    """Set of the block ids that the prefix cache can find. The pool keeps their content as long as possible."""

    @property
    def has(self) -> Callable[[int], bool]: ...
    def has_each(self, block_ids: Words, /) -> Flags: ...


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = 0
        self.num_freed = 0  # how often a block has become free: while it stays, no more blocks have
        self._counts = array("i", bytes(4 * num_blocks))
        self._blank = array("i", range(num_blocks - 1, -1, -1))  # the next one last
        self._line = array(
            "i"
        )  # released and cached, in that order; from `_first` on, what is before has been handed out
        self._first = 0
        self._cleared = 0  # entries that `_line` no longer has at its head
        self._places = (
            array("q", [_NOWHERE]) * num_blocks
        )  # of each free cached block: its entry, with the cleared ones
        self._num_cached = 0
        # The same memory, for many at a time.
        self._counts_of = np.frombuffer(self._counts, np.int32)
        self._places_of = np.frombuffer(self._places, np.int64)

    @property
    def num_free(self) -> int:
        """Number of blocks that are neither used nor reserved."""
        return len(self._blank) + self._num_cached - self.num_reserved

    @property
    def usage(self) -> float:
        """Fraction of blocks that are used or reserved, from 0 to 1. An empty pool has 0."""
        return 1.0 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def count(self, block_id: int) -> int:
        return self._counts[block_id]

    def states(self, per_cell: int) -> bytes:
        """Return three bytes for each group of `per_cell` consecutive blocks, for display. They are fractions scaled to 255:
        blocks used by one sequence, blocks used by several, and unused blocks that are cached. The call reads the whole pool."""
        starts = np.arange(0, self.num_blocks, per_cell)
        sizes = np.diff(starts, append=self.num_blocks)
        counts = self._counts_of
        kinds = counts == 1, counts > 1, (counts == 0) & (self._places_of != _NOWHERE)
        parts = [-(-255 * np.add.reduceat(kind.astype(np.int32), starts) // sizes) for kind in kinds]
        return bytes(np.stack(parts, axis=-1).astype(np.uint8).tobytes())

    def num_idle(self, ids: Sequence[int]) -> int:
        """Return the number of blocks in `ids` that have reference count 0."""
        return len(ids) - int(np.count_nonzero(self._counts_of[np.asarray(ids, np.int32)]))

    def reserve(self, num: int) -> None:
        """Reserve `num` blocks for a later `allocate` or `unreserve`. Raises RuntimeError if `num_free` is less than `num`."""
        self._check_free(num)
        self.num_reserved += num

    def unreserve(self, num: int) -> None:
        if not 0 <= num <= self.num_reserved:
            raise RuntimeError(f"{num} blocks given up, {self.num_reserved} reserved")
        self.num_reserved -= num
        self.num_freed += num

    def allocate(self, num: int, num_reserved: int = 0) -> BlockIds:
        """Return the ids of `num` blocks and set their reference counts to 1. The caller may overwrite their content.
        `num_reserved` of them come from the reservations. Raises RuntimeError if `num_free` is too small for the rest."""
        self._check_free(num - num_reserved)
        if num_reserved > self.num_reserved:
            raise RuntimeError(f"{num_reserved} promised blocks asked, {self.num_reserved} reserved")
        self.num_reserved -= num_reserved
        ids = self._blank[: -num - 1 : -1]
        del self._blank[len(self._blank) - len(ids) :]
        if len(ids) < num:
            self._take_cached(num, ids)
        if num < MANY:
            for block_id in ids:
                self._counts[block_id] = 1
        else:
            self._counts_of[np.frombuffer(ids, np.int32)] = 1
        return ids

    def _take_cached(self, num: int, ids: BlockIds) -> None:
        """Append the ids of the least recently used cached blocks to `ids` until it has `num`."""
        line, places, first, cleared = self._line, self._places, self._first, self._cleared
        self._num_cached -= num - len(ids)
        while len(ids) < num:
            block_id = line[first]
            if places[block_id] == cleared + first:
                places[block_id] = _NOWHERE
                ids.append(block_id)
                first += 1
            else:
                first = self._next_in_line(first + 1)
        if first > self.num_blocks:
            del line[:first]
            self._cleared += first
            first = 0
        self._first = first

    def _next_in_line(self, first: int) -> int:
        num = 16
        while first < len(self._line):
            counts = self._entries_that_count(first, first + num)
            if counts.any():
                return first + int(counts.argmax())
            first, num = first + num, 2 * num
        raise RuntimeError("fewer cached blocks than were counted")

    def _entries_that_count(self, start: int, end: int) -> Flags:
        ids = np.frombuffer(self._line, np.int32)[start:end]
        start += self._cleared
        counts: Flags = self._places_of[ids] == np.arange(start, start + len(ids))
        return counts

    def share(self, ids: Sequence[int]) -> None:
        """Add a reference to each block in `ids`, which must be distinct. Blocks with count 0 leave the free lists. Raises
        RuntimeError if more of them have count 0 than blocks are free and not reserved."""
        if len(ids) >= MANY:
            self._share_many(np.asarray(ids, np.int32))
            return
        counts = self._counts
        idle = [block_id for block_id in ids if not counts[block_id]]
        if idle:
            self._check_free(len(idle))
            places = self._places
            for block_id in idle:
                if places[block_id] == _NOWHERE:
                    self._blank.remove(block_id)  # no hit, which is cached: the target of a copy
                    self._num_cached += 1
                places[block_id] = _NOWHERE
            self._num_cached -= len(idle)
        for block_id in ids:
            counts[block_id] += 1

    def _share_many(self, ids: Words) -> None:
        counts = self._counts_of[ids]
        idle = ids[counts == 0]
        self._check_free(len(idle))
        blank = idle[self._places_of[idle] == _NOWHERE]
        for block_id in blank.tolist():
            self._blank.remove(block_id)
        self._places_of[idle] = _NOWHERE
        self._num_cached -= len(idle) - len(blank)
        self._counts_of[ids] = counts + 1

    def release(self, ids: Sequence[int], cached: Cached) -> None:
        """Remove a reference from each block in `ids`, which must be distinct. Blocks are freed from last to first, so that the
        end of a sequence is reused before its start."""
        if len(ids) >= MANY:
            self._release_many(np.asarray(ids, np.int32)[::-1], cached)
        else:
            self._release_few(ids, cached.has)
        if len(self._line) - self._first > 2 * self.num_blocks:
            self._clear_away()

    def _release_few(self, ids: Sequence[int], has: Callable[[int], bool]) -> None:
        counts, places, line, blank = self._counts, self._places, self._line, self._blank
        num_blank, first_place = len(blank), self._cleared + len(line)
        place = first_place
        for block_id in reversed(ids):
            left = counts[block_id] = counts[block_id] - 1
            if left <= 0:
                if left:
                    raise RuntimeError(f"block {block_id} released more often than taken")
                if has(block_id):
                    places[block_id] = place
                    place += 1
                    line.append(block_id)
                else:
                    blank.append(block_id)
        self._num_cached += place - first_place
        self.num_freed += place - first_place + len(blank) - num_blank

    def _release_many(self, ids: Words, cached: Cached) -> None:
        left = self._counts_of[ids] - 1
        if left.min() < 0:
            raise RuntimeError(f"block {ids[left.argmin()]} released more often than taken")
        self._counts_of[ids] = left
        idle = ids[left == 0]
        self.num_freed += len(idle)
        is_cached = cached.has_each(idle)
        self._blank.frombytes(idle[~is_cached].tobytes())
        idle = idle[is_cached]
        start = self._cleared + len(self._line)
        self._places_of[idle] = np.arange(start, start + len(idle))
        self._line.frombytes(idle.tobytes())
        self._num_cached += len(idle)

    def _clear_away(self) -> None:
        end = len(self._line)
        left = np.frombuffer(self._line, np.int32)[self._first :][self._entries_that_count(self._first, end)]
        self._line = array("i", left.tobytes())
        self._first = self._cleared = 0
        self._places_of[left] = np.arange(len(left))

    def _check_free(self, num: int) -> None:
        if num > self.num_free:
            raise RuntimeError(f"{num} blocks asked, {self.num_free} free and not reserved")
