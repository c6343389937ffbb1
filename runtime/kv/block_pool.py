"""Block pool: which KV blocks are free, and how many sequences use each of the others.

Invariant: a block is in the free queue exactly when its count is 0. The queue's order is the order of reuse: blocks with
nothing worth keeping at the head, cached ones at the tail, least recently used first. An OrderedDict, not a deque, because
a prefix hit takes a block out of the middle. Knows ids only: neither hashes nor tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, block_id: int) -> int:
        return self._counts[block_id]

    def num_idle(self, ids: Iterable[int]) -> int:
        """How many of them nobody uses."""
        return [*map(self._counts.__getitem__, ids)].count(0)

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with count 1, whatever they held before is gone. The caller checked `num_free`."""
        if num > len(self._free):
            raise RuntimeError(f"{num} blocks asked, {len(self._free)} free")
        ids = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block_id in ids:
            self._counts[block_id] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more user for each; a free one leaves the queue."""
        for block_id in ids:
            if self._counts[block_id] == 0:
                del self._free[block_id]
            self._counts[block_id] += 1

    def release(self, ids: Sequence[int], worth_keeping: Callable[[int], bool]) -> None:
        """One user less for each, from the tail, so that a sequence's last blocks are reused before its first."""
        for block_id in reversed(ids):
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                self._free[block_id] = None
                if not worth_keeping(block_id):
                    self._free.move_to_end(block_id, last=False)
            elif self._counts[block_id] < 0:
                raise RuntimeError(f"block {block_id} released more often than taken")
