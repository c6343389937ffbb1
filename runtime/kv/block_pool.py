"""Block pool: which KV blocks are free, how many of them are promised, and how many sequences use each of the others.

Invariant: a block is in one of the two free lines exactly when its count is 0, and no more are promised than are free. Blocks with
nothing worth keeping are handed out first, the last released before the others; then cached ones, least recently used first. The
latter are an OrderedDict, not a deque, because a prefix hit takes a block out of the middle. A promise is a number, not blocks:
until it is kept, what the blocks hold can still be hit. Knows ids only: neither hashes nor tensors.

All but the deciding is done for many ids at a time: a prompt has thousands of blocks, and they are counted on the event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = 0
        self.num_freed = 0  # how often a block has become free: while it stays, no more blocks have
        self._counts = [0] * num_blocks
        self._blank = [*range(num_blocks - 1, -1, -1)]  # the next one last
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses and nobody has been promised."""
        return len(self._blank) + len(self._kept) - self.num_reserved

    def count(self, block_id: int) -> int:
        return self._counts[block_id]

    def num_idle(self, ids: Iterable[int]) -> int:
        """How many of them nobody uses."""
        return [*map(self._counts.__getitem__, ids)].count(0)

    def reserve(self, num: int) -> None:
        """Promise `num` blocks, to be taken by `allocate` or given up by `unreserve`. The caller checked `num_free`."""
        self._check_free(num)
        self.num_reserved += num

    def unreserve(self, num: int) -> None:
        if not 0 <= num <= self.num_reserved:
            raise RuntimeError(f"{num} blocks given up, {self.num_reserved} reserved")
        self.num_reserved -= num
        self.num_freed += num

    def allocate(self, num: int, num_reserved: int = 0) -> list[int]:
        """`num` blocks with count 1, whatever they held before is gone; `num_reserved` of them had been promised. The caller
        checked `num_free` for the rest."""
        self._check_free(num - num_reserved)
        if num_reserved > self.num_reserved:
            raise RuntimeError(f"{num_reserved} promised blocks asked, {self.num_reserved} reserved")
        self.num_reserved -= num_reserved
        ids = self._blank[: -num - 1 : -1]
        del self._blank[len(self._blank) - len(ids) :]
        while len(ids) < num:
            ids.append(self._kept.popitem(last=False)[0])
        counts = self._counts
        for block_id in ids:
            counts[block_id] = 1
        return ids

    def share(self, ids: Sequence[int]) -> None:
        """One more user for each; a free one, of which there must be enough that nobody was promised, leaves its line."""
        counts = self._counts
        idle = [block_id for block_id in ids if not counts[block_id]]
        if idle:
            self._check_free(len(idle))
            self._take_out(idle)
        for block_id in ids:
            counts[block_id] += 1

    def _take_out(self, idle: list[int]) -> None:
        kept = self._kept
        for block_id in idle:
            if block_id in kept:
                del kept[block_id]
            else:  # no hit, which has a name and was kept for it: the target of a copy
                self._blank.remove(block_id)

    def release(self, ids: Sequence[int], worth_keeping: Callable[[int], bool]) -> None:
        """One user less for each, from the tail, so that a sequence's last blocks are reused before its first."""
        counts = self._counts
        idle = []
        for block_id in reversed(ids):
            left = counts[block_id] = counts[block_id] - 1
            if left <= 0:
                if left:
                    raise RuntimeError(f"block {block_id} released more often than taken")
                idle.append(block_id)
        self.num_freed += len(idle)
        self._blank += filterfalse(worth_keeping, idle)
        for block_id in filter(worth_keeping, idle):
            self._kept[block_id] = None

    def _check_free(self, num: int) -> None:
        if num > self.num_free:
            raise RuntimeError(f"{num} blocks asked, {self.num_free} free and not reserved")
