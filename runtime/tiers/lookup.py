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


class TierLookup:
    def __init__(
        self, host: HostTier, disk: DiskTier | None, slot_bytes: int, token_s: float, stats: TierStats
    ) -> None:
        """Create a lookup. `token_s`: measured time in which a prompt's token is computed."""
        self.host, self.disk, self.stats = host, disk, stats
        self.token_s = token_s
        self._slot_bytes = slot_bytes

    def worth_reading(
        self, cache: PrefixCache, names: Several[BlockHash], num_cached: int, num: int
    ) -> tuple[int, list[Key]]:
        """Return how many tokens need not be computed if entries are brought up, and these entries. `num_cached`: hashed blocks
        of the cached prefix. Without entries of the disk where these would take longer than computing, and none where the
        others would, too."""
        tiers: list[tuple[Container[Key], ...]] = [(self.host,)]
        if self.disk is not None:
            tiers.insert(0, (self.host, self.disk))
        for found_in in tiers:
            longest, missing = self._missing(cache, names, num_cached, num, found_in)
            if not missing:
                continue
            num_tokens = (longest - num_cached) * cache.block_size
            if self._read_s(cache, missing) < num_tokens * self.token_s:
                return num_tokens, missing
            self.stats.num_too_slow += num_tokens
            self.stats.rates[FROM_HOST].refused()
            self.stats.rates[FROM_DISK].refused()
        return 0, []

    def _missing(
        self, cache: PrefixCache, names: Several[BlockHash], num_cached: int, num: int, tiers: Several[Container[Key]]
    ) -> tuple[int, list[Key]]:
        """Return the longest prefix that cache and `tiers` have together, in hashed blocks, and what of it only the tiers have."""
        found = [_Names(index, cache.named(index), tiers) for index in range(len(cache.groups))]
        while (num := cache.longest_prefix(names, num, found)) > num_cached:
            longest, missing = num, list[Key]()
            for index, group in enumerate(cache.groups):
                cached, needed = cache.named(index), cache.needed(group, names, num)
                for place, name in enumerate(needed):
                    if name in cached:
                        continue
                    if name not in found[index]:  # the group's kind was too hopeful
                        longest = cache.without(group, num, len(needed) - place)
                        break
                    missing.append((index, name))
                if longest != num:
                    break
            if longest == num:
                return num, missing
            num = longest
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
