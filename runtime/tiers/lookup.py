"""Lookup of prefixes in the KV tiers, with the decision whether reading the entries is faster than computing the tokens."""

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
        """Create a lookup. `token_s`: measured time to compute one token of a prompt, in seconds. `slot_bytes`: bytes of one
        block."""
        self.host, self.disk, self.stats = host, disk, stats
        self.token_s = token_s
        self._slot_bytes = slot_bytes

    def worth_reading(
        self, cache: PrefixCache, names: Several[BlockHash], num_cached: int, num: int
    ) -> tuple[int, list[Key]]:
        """Return (number of tokens, entries): the tokens that need not be computed if these entries are read from the tiers.
        `names`: hashes of the prompt's blocks, of which at most `num` are used. `num_cached`: length of the cached prefix, in
        hashed blocks. If reading from disk is slower than computing, only host entries are returned. If that is slower too, the
        result is (0, [])."""
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
        """Return the longest prefix in cache and `tiers` together, in hashed blocks, and the entries of it that are not in the
        cache."""
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
    __slots__ = ("_cached", "_group", "_tiers")

    def __init__(self, group: int, cached: Container[BlockHash], tiers: Several[Container[Key]]) -> None:
        self._group = group
        self._cached = cached
        self._tiers = tiers

    def __contains__(self, name: object) -> bool:
        return name in self._cached or any((self._group, name) in tier for tier in self._tiers)
