"""Block pool: free blocks, reservations, and a reference count of each used block.

Invariant: a block with count 0 is in exactly one of the two free lists, and reservations never exceed free blocks. Blank
blocks, without reusable content, are allocated first, the last released first; then cached blocks, least recently used first. A
reservation is a number, so cached blocks stay available for hits until they are allocated. Contains ids only: no hashes, no
tensors.

A long prompt allocates and frees thousands of blocks on the event loop, so large operations use numpy and small ones do not.
A prefix hit removes blocks from the middle of the cached list. The list therefore records releases: an entry is valid while
its block's position in `_places` matches. Invalid entries are skipped, and removed once the list is twice as long as the
pool."""

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
    """Set of the blocks whose contents are worth keeping."""

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
        """The share of blocks that are not free, 0 of none."""
        return 1.0 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def count(self, block_id: int) -> int:
        return self._counts[block_id]

    def states(self, per_cell: int) -> bytes:
        """Return three bytes for each `per_cell` blocks: the shares (of 255) used by one sequence, by several, and cached
        only. The rest is free. For display: it reads the whole pool."""
        starts = np.arange(0, self.num_blocks, per_cell)
        sizes = np.diff(starts, append=self.num_blocks)
        counts = self._counts_of
        kinds = counts == 1, counts > 1, (counts == 0) & (self._places_of != _NOWHERE)
        parts = [-(-255 * np.add.reduceat(kind.astype(np.int32), starts) // sizes) for kind in kinds]
        return bytes(np.stack(parts, axis=-1).astype(np.uint8).tobytes())

    def num_idle(self, ids: Sequence[int]) -> int:
        """Return how many of the blocks `ids` no sequence uses."""
        return len(ids) - int(np.count_nonzero(self._counts_of[np.asarray(ids, np.int32)]))

    def reserve(self, num: int) -> None:
        """Promise `num` blocks, to be taken by `allocate` or given up by `unreserve`. The caller checked `num_free`."""
        self._check_free(num)
        self.num_reserved += num

    def unreserve(self, num: int) -> None:
        if not 0 <= num <= self.num_reserved:
            raise RuntimeError(f"{num} blocks given up, {self.num_reserved} reserved")
        self.num_reserved -= num
        self.num_freed += num

    def allocate(self, num: int, num_reserved: int = 0) -> BlockIds:
        """Return `num` blocks with count 1; their former contents are lost. `num_reserved` of them were reserved before. The
        caller has checked `num_free` for the rest."""
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
        """The least recently used, until there are `num` ids."""
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
        """The first entry from `first` on that counts."""
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
        """Add a reference to each of these different blocks. Free ones leave the free list; enough must be unreserved."""
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
        """One user less for each of these different blocks, from the tail, so that a sequence's last ones are reused before its
        first."""
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
        """Entries of the line that no longer count."""
        end = len(self._line)
        left = np.frombuffer(self._line, np.int32)[self._first :][self._entries_that_count(self._first, end)]
        self._line = array("i", left.tobytes())
        self._first = self._cleared = 0
        self._places_of[left] = np.arange(len(left))

    def _check_free(self, num: int) -> None:
        if num > self.num_free:
            raise RuntimeError(f"{num} blocks asked, {self.num_free} free and not reserved")
