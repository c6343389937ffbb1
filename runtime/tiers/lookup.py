"""Lookup: what of a prefix lies in tiers, and whether it is quicker to read than to compute."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

from runtime.tiers.host import HostTier, Key
from runtime.tiers.stats import FROM_DISK, FROM_HOST, TierStats

if TYPE_CHECKING:
    from runtime.kv.prefix_cache import BlockHash, PrefixCache
    from runtime.tiers.disk import DiskTier


class Lookup:
    def __init__(
        self, host: HostTier, disk: DiskTier | None, slot_bytes: int, token_s: float, stats: TierStats
    ) -> None:
        """Create a lookup. `token_s`: measured time in which a prompt's token is computed."""
        self.host, self.disk, self.stats = host, disk, stats
        self.token_s = token_s
        self._slot_bytes = slot_bytes

    def worth_reading(self, cache: PrefixCache, names: Several[BlockHash], num_cached: int, num: int) -> list[Key]:
        """Return the entries to bring up of a prefix of `num_cached` cached entries. Without those of the disk where these would
        take longer than computing, and none where the others would, too."""
        tiers: list[tuple[Container[Key], ...]] = [(self.host,)]
        if self.disk is not None:
            tiers.insert(0, (self.host, self.disk))
        for found_in in tiers:
            longest, missing = self._missing(cache, names, num_cached, num, found_in)
            if not missing:
                continue
            saved_s = (longest - num_cached) * cache.block_size * self.token_s
            if self._read_s(cache, missing) < saved_s:
                return missing
            self.stats.num_too_slow += (longest - num_cached) * cache.block_size
            self.stats.rates[FROM_HOST].refused()
            self.stats.rates[FROM_DISK].refused()
        return []

    def _missing(
        self, cache: PrefixCache, names: Several[BlockHash], num_cached: int, num: int, tiers: Several[Container[Key]]
    ) -> tuple[int, list[Key]]:
        """Return the longest prefix that cache and `tiers` have together, in entries, and what of it only the tiers have."""
        block_size = cache.block_size
        while num > num_cached:
            before = num
            for index, group in enumerate(cache.groups):
                num = group.kind.longest_prefix(names, num, _Names(index, cache.named(index), tiers), block_size)
            if num != before:
                continue
            missing: list[Key] = []
            for index, group in enumerate(cache.groups):
                cached = cache.named(index)
                for entry in range(group.first_in_window(num * block_size) // block_size, num):
                    if names[entry] in cached:
                        continue
                    if not any((index, names[entry]) in tier for tier in tiers):
                        num = entry  # the group's kind was too hopeful
                        break
                    missing.append((index, names[entry]))
                if num != before:
                    break
            else:
                return num, missing
        return num_cached, []

    def _read_s(self, cache: PrefixCache, missing: Several[Key]) -> float:
        width, num_bytes = {index: group.width for index, group in enumerate(cache.groups)}, self._slot_bytes
        total = num_bytes * sum(width[key[0]] for key in missing)
        from_disk = num_bytes * sum(width[key[0]] for key in missing if key not in self.host)
        return self.stats.rates[FROM_HOST].seconds(total) + self.stats.rates[FROM_DISK].seconds(from_disk)


class _Names:
    """Names of a group's entries that the prefix cache or a tier has."""

    __slots__ = ("_cached", "_group", "_tiers")

    def __init__(self, group: int, cached: Container[BlockHash], tiers: Several[Container[Key]]) -> None:
        self._group = group
        self._cached = cached
        self._tiers = tiers

    def __contains__(self, name: object) -> bool:
        return name in self._cached or any((self._group, name) in tier for tier in self._tiers)
