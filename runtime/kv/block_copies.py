"""Block copies: requested by code that shares or moves blocks, executed with the next batch, and held until it settles.

Until then both blocks of a copy have an extra reference, so neither is reallocated before it was read and written."""

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
        """Ids of blocks that copies keep alive, as often as they do."""
        return [block_id for copy in (*self._unsent, *self._unsettled) for block_id in copy]

    def add(self, source: int, target: int) -> None:
        """Copy in the next batch. What `target` held is gone for the prefix cache."""
        self._pool.share((source, target))
        self._cache.forget((target,))
        self._unsent.append(BlockCopy(source, target))

    def take(self) -> tuple[BlockCopy, ...]:
        """All that no batch has carried yet."""
        taken = tuple(self._unsent)
        self._unsettled += taken
        self._unsent.clear()
        return taken

    def release(self, copies: Iterable[BlockCopy]) -> None:
        """The batch that carried `copies` has settled, or failed."""
        for copy in copies:
            self._unsettled.remove(copy)
            self._pool.release(copy, self._cache)
