"""Queue of copies between KV blocks. The next batch executes them, and each copy is tracked until that batch has completed.
Until then both blocks of a copy have an extra reference, so that the pool does not reuse either of them too early."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.batch import BlockCopy
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache


class BlockCopies:
    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._unsent: list[BlockCopy] = []
        self._unsettled: list[BlockCopy] = []

    @property
    def block_ids(self) -> list[int]:
        """Return the source and target ids of all copies that have not completed. An id appears once for each copy that uses it."""
        return [block_id for copy in (*self._unsent, *self._unsettled) for block_id in copy]

    def add(self, source: int, target: int) -> None:
        """Queue a copy of block `source` to block `target` for the next batch, and remove `target` from the prefix cache."""
        self._pool.share((source, target))
        self._cache.forget((target,))
        self._unsent.append(BlockCopy(source, target))

    def take(self) -> tuple[BlockCopy, ...]:
        """Return the queued copies for the batch that is being scheduled, and empty the queue."""
        taken = tuple(self._unsent)
        self._unsettled += taken
        self._unsent.clear()
        return taken

    def release(self, copies: Iterable[BlockCopy]) -> None:
        """Drop the references to the blocks of `copies`. Called when the batch that executed `copies` has completed or failed."""
        for copy in copies:
            self._unsettled.remove(copy)
            self._pool.release(copy, self._cache)
