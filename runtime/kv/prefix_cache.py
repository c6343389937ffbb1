"""Prefix cache: finds the block that already holds a given span after a given prefix.

A full block is named by a hash chain: sha256(parent's hash, its token ids), rooted in a random per-process key and the
sequence's extras (cache_salt), so a hit means the whole prefix is the same, and tenants with different salts never meet.
Blocks stay findable after their last user left, until the pool hands them out again; then `forget` is due.
Knows ids and hashes, not sequences."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NewType

BlockHash = NewType("BlockHash", bytes)  # sha256: a collision would show one tenant's text to another


class PrefixCache:
    def __init__(self, block_size: int, enabled: bool = True) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self._key = os.urandom(32)
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._hash_of

    def extend_chain(self, chain: list[BlockHash], token_ids: Sequence[int], salt: str | None) -> None:
        """Append the hashes of the full blocks of `token_ids` that `chain` lacks."""
        size = self.block_size
        missing = range(len(chain) * size, len(token_ids) - size + 1, size)
        if not missing:
            return
        parent = chain[-1] if chain else self._root(salt)
        for start in missing:
            parent = BlockHash(sha256(parent + array("q", token_ids[start : start + size]).tobytes()).digest())
            chain.append(parent)

    def _root(self, salt: str | None) -> BlockHash:
        return BlockHash(sha256(self._key + (b"" if salt is None else b"salt:" + salt.encode())).digest())

    def match(self, chain: Sequence[BlockHash], max_blocks: int) -> list[int]:
        """Block ids of the longest cached prefix of `chain`, `max_blocks` at most."""
        hits: list[int] = []
        if self.enabled:
            for block_hash in chain[:max_blocks]:
                block_id = self._block_of.get(block_hash)
                if block_id is None:
                    break
                hits.append(block_id)
        return hits

    def insert(self, block_hash: BlockHash, block_id: int) -> None:
        """The first block with a content wins; a twin computed beside it stays nameless and is reused first."""
        if self.enabled and block_hash not in self._block_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            block_hash = self._hash_of.pop(block_id, None)
            if block_hash is not None:
                del self._block_of[block_hash]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
