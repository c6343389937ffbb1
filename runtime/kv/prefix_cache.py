"""Prefix cache: maps hashes of token prefixes to the blocks that contain their keys and values or states.

A full block is named by a hash chain: sha256 of the previous block's hash, its token ids and the media at its positions. The chain
begins with a random key of the process and the sequence's extras (cache_salt, adapter). A hit therefore means an equal prefix.
Tenants with different salts, adapters or adapter versions never share blocks. Each group of layers has its own blocks under a name.
The memory kind determines how many entries of a prefix the group needs.

Where states are large, an entry of a block table covers several hashed blocks. A full entry has the name of its last hashed block.
A snapshot may end within an entry. Its copy of that entry has the name of the last hashed block before the end.

Blocks stay cached after their last reference is released, until the pool reallocates them and `forget` is called. The cache
contains ids and hashes, no sequences."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, NewType

import numpy as np

from runtime.api import CacheRoot
from runtime.kv.block_pool import MANY, BlockIds, Flags, Words
from runtime.kv.kinds import AttentionKVSpec, Full
from runtime.kv.layout import LayerGroup

BlockHash = NewType("BlockHash", bytes)  # sha256: a collision would show one tenant's text to another
NOBODYS: CacheRoot = (None, 0)
NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})
PLAIN = (LayerGroup(Full(AttentionKVSpec(1, 1))),)


class Match(NamedTuple):
    """Cached prefix of a prompt. Its first `num_entries` hashed blocks need not be computed. `ids`: for each layer group, ids of
    the cached blocks that the following tokens read."""

    num_entries: int
    ids: list[BlockIds]


class _LastMatch:
    """Result of the last lookup. A waiting sequence repeats its lookup at every step. `names`: hashes whose insertion or
    eviction changes the result; None means any hash."""

    __slots__ = ("block_hashes", "key", "match", "names", "stale")

    def __init__(
        self, block_hashes: Sequence[BlockHash], key: tuple[int, int], match: Match, names: frozenset[BlockHash] | None
    ) -> None:
        self.block_hashes = block_hashes
        self.key = key
        self.match = match
        self.names = names
        self.stale = False

    def note(self, names: Iterable[BlockHash]) -> None:
        """Mark the result as stale if an entry in `names` affects it. Called when the entries were added or removed."""
        self.stale = self.stale or self.names is None or not self.names.isdisjoint(names)


def _interleaved(columns: list[list[int | None]]) -> BlockIds:
    """Return the ids of all columns, row by row. Raises struct.error if an id is None."""
    width, num = len(columns), len(columns[0])
    ids = columns[0] if width == 1 else chain.from_iterable(zip(*columns, strict=True))
    return array("i", struct.pack(f"{num * width}i", *ids))  # a third of what array(ids) costs


class PrefixCache:
    def __init__(
        self, block_size: int, enabled: bool = True, groups: Sequence[LayerGroup] = PLAIN, key: bytes | None = None,
        entry_blocks: int = 1,
    ) -> None:  # fmt: skip
        """Create an empty cache. `block_size`: tokens of a hashed block. `key`: 32 random bytes that make hashes unpredictable;
        caches with equal keys compute equal hashes. `entry_blocks`: number of hashed blocks for each entry of a block table."""
        self.block_size = block_size
        self.entry_size = block_size * entry_blocks  # tokens
        self._entry_blocks = entry_blocks
        self.enabled = enabled
        self.groups = groups
        self._key = key or os.urandom(32)
        # An entry of a group is as many blocks as the group is wide, in so many dicts: what has no tuples costs half as much.
        self._blocks_of: list[list[dict[BlockHash, int]]] = [[{} for _ in range(group.width)] for group in groups]
        self._name_of: dict[int, BlockHash] = {}
        self.has = self._name_of.__contains__  # whether a block can be found
        self._has = bytearray()  # by block, as far as any were named: whether it is in `_name_of`
        self._named = [columns[0] for columns in self._blocks_of]
        self._last: _LastMatch | None = None

    def __len__(self) -> int:
        return len(self._name_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._name_of

    def has_each(self, block_ids: Words) -> Flags:
        """Return for each block id in `block_ids` [N] whether the block is cached, as a bool array [N]."""
        self._cover(block_ids.max(initial=-1))
        return np.frombuffer(self._has, np.bool_)[block_ids]

    def _note_has(self, block_ids: Sequence[int]) -> None:
        if len(block_ids) < MANY:
            for block_id in block_ids:
                self._cover(block_id)
                self._has[block_id] = 1
        else:
            each = np.asarray(block_ids, np.int32)
            self._cover(each.max())
            np.frombuffer(self._has, np.bool_)[each] = True

    def _cover(self, block_id: int) -> None:
        if block_id >= len(self._has):
            self._has += bytes(block_id + 1)

    def hash_blocks(
        self, token_ids: Sequence[int], root: CacheRoot = NOBODYS, parent: BlockHash | None = None,
        extras: Mapping[int, bytes] = NO_EXTRAS, first_block: int = 0,
    ) -> list[BlockHash]:  # fmt: skip
        """Return the hashes of the full blocks in `token_ids`. `parent`: hash of the block before `token_ids`. `first_block`:
        index of the first block of `token_ids` in the sequence. `extras`: bytes of media to hash, by block index. Thread-safe."""
        size, block_hashes = self.block_size, []
        last = self._root(root) if parent is None else parent
        for start in range(0, len(token_ids) - size + 1, size):
            content = last + array("q", token_ids[start : start + size]).tobytes()
            if extras:
                content += extras.get(first_block + start // size, b"")
            last = BlockHash(sha256(content).digest())
            block_hashes.append(last)
        return block_hashes

    def _root(self, root: CacheRoot) -> BlockHash:
        salt, adapter = root
        extras = struct.pack("<q", adapter) + (b"" if salt is None else b"salt:" + salt.encode())
        return BlockHash(sha256(self._key + extras).digest())

    def match(self, block_hashes: Sequence[BlockHash], max_entries: int) -> Match:
        """Return the longest usable prefix of `block_hashes`, at most `max_entries` blocks long: every group has the blocks that
        tokens after the prefix read.

        The result is cached. If the same list is looked up again, it is recomputed only after one of its blocks was added or
        removed."""
        last, key = self._last, (len(block_hashes), max_entries)
        again = last is not None and last.block_hashes is block_hashes and last.key == key
        if last is not None and again and not last.stale:
            return last.match
        match = self._match(block_hashes, max_entries)
        self._last = _LastMatch(block_hashes, key, match, frozenset(block_hashes) if again else None)
        return match

    def named(self, group: int) -> Container[BlockHash]:
        """Return the names of all cached entries of the layer group with index `group`."""
        return self._named[group]

    def entry(self, group: int, name: BlockHash) -> list[int]:
        """Return the block ids of the cached entry `name` of layer group `group`; an empty list if it is not cached."""
        columns = self._blocks_of[group]
        return [column[name] for column in columns] if name in columns[0] else []

    def num_cached(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return an upper bound of the number of blocks in the prefix that `match` would return."""
        return self.longest_prefix(block_hashes, len(block_hashes), self._named) if self.enabled else 0

    def _match(self, block_hashes: Sequence[BlockHash], max_entries: int) -> Match:
        num = min(len(block_hashes), max_entries) if self.enabled else 0
        ids: list[BlockIds] = []
        while len(ids) < len(self.groups):
            num, ids = self.longest_prefix(block_hashes, num, self._named), []
            for group, blocks_of in zip(self.groups, self._blocks_of, strict=True):
                names = self.needed(group, block_hashes, num)
                found = [[*map(column.get, names)] for column in blocks_of]
                try:
                    ids.append(_interleaved(found))
                except struct.error:  # the group's kind was too hopeful
                    num = self.without(group, num, len(names) - found[0].index(None))
                    break
        return Match(num, ids)

    # --- entries and hashed blocks --------------------------------------------------------------------------------

    def longest_prefix(self, names: Sequence[BlockHash], num: int, cached: Sequence[Container[BlockHash]]) -> int:
        """Return an upper bound of the usable prefix, in hashed blocks, at most `num`. `cached`: names of the available entries
        of each layer group."""
        before = -1
        while num != before:  # what one group lacks shortens the prefix for the others
            before = num
            for group, of_group in zip(self.groups, cached, strict=True):
                per = self.entry_blocks(group)
                if per == 1:
                    num = group.kind.longest_prefix(names, num, of_group, self.block_size)
                    continue
                full = num // per
                longest = group.kind.longest_prefix(names[per - 1 : full * per : per], full, of_group, self.entry_size)
                num = min(num, (longest + 1) * per - 1)
                while num % per and names[num - 1] not in of_group:  # a snapshot may end in the entry behind
                    num -= 1
        return num

    def needed(self, group: LayerGroup, names: Sequence[BlockHash], num: int) -> Sequence[BlockHash]:
        """Return the names of the entries of `group` that tokens after the first `num` hashed blocks read."""
        per = self.entry_blocks(group)
        first = group.first_in_window(num * self.block_size) // (self.block_size * per)
        needed = names[first * per + per - 1 : num : per]
        return [*needed, names[num - 1]] if num % per else needed

    def without(self, group: LayerGroup, num: int, num_missing: int) -> int:
        """Return the number of hashed blocks in a prefix of `num` without its last `num_missing` entries of `group`."""
        per = self.entry_blocks(group)
        return (-(-num // per) - num_missing) * per

    def entry_blocks(self, group: LayerGroup) -> int:
        """Return how many hashed blocks an entry of `group` covers. It is 1 for groups whose entries do not grow with the
        tokens."""
        return self._entry_blocks if group.kind.grows else 1

    def insert(self, names: Sequence[BlockHash], group: int, block_ids: Sequence[int]) -> None:
        """Insert consecutive entries `names` of layer group `group`, which consist of blocks `block_ids`. If a name is already
        cached, its existing blocks stay cached and the new ones are not."""
        if not self.enabled:
            return
        blocks_of = self._blocks_of[group]
        width = len(blocks_of)
        if not blocks_of[0].keys().isdisjoint(names):
            new = [index for index, name in enumerate(names) if name not in blocks_of[0]]
            block_ids = [block_ids[index * width + column] for index in new for column in range(width)]
            names = [names[index] for index in new]
        for number, column in enumerate(blocks_of):
            of_column = [
                *(block_ids[number::width] if width > 1 else block_ids)
            ]  # one object of a number in both dicts
            column.update(zip(names, of_column, strict=True))
            self._name_of.update(zip(of_column, names, strict=True))
        self._note_has(block_ids)
        if names and self._last is not None:
            self._last.note(names)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove the cached entries that contain any of the blocks `block_ids`."""
        name_of, gone = self._name_of, []
        for block_id in filter(name_of.__contains__, block_ids):
            name = name_of[block_id]
            for blocks_of in self._blocks_of:
                if blocks_of[0].get(name) == block_id or any(more.get(name) == block_id for more in blocks_of[1:]):
                    for column in blocks_of:
                        other = column.pop(name)
                        del name_of[other]
                        self._has[other] = False
                    break
            gone.append(name)
        if gone and self._last is not None:
            self._last.note(gone)

    def clear(self) -> None:
        for column in chain.from_iterable(self._blocks_of):
            column.clear()
        self._name_of.clear()
        self._has.clear()
        self._last = None
