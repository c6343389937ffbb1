"""PrefixCache.match: the longest prefix behind which every group finds what it sees, whatever has gone meanwhile."""

import os
from array import array
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.block_pool import MANY
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import BlockHash, PrefixCache
from tests.kinds import chunk, full, window

BLOCK = 4
GROUPS = {
    "full": (LayerGroup(full(1, 8)),),
    "wide": (LayerGroup(full(1, 8), 3),),
    "window": (LayerGroup(window(1, 8, 9)),),
    "both": (LayerGroup(full(1, 8), 2), LayerGroup(window(1, 8, 9))),
    "chunks": (LayerGroup(full(1, 8), 2), LayerGroup(chunk(1, 8, 12), 3)),
    "two windows": (LayerGroup(window(1, 8, 9)), LayerGroup(window(1, 8, 21), 2)),
}


def filled(groups, names: list[BlockHash]) -> tuple[PrefixCache, list[list[tuple[int, ...]]]]:
    """A cache that has all `names`, and for each group the ids of each entry."""
    cache, ids = PrefixCache(BLOCK, groups=groups), count()
    entries = [[tuple(next(ids) for _ in range(group.width)) for _ in names] for group in groups]
    for index, each in enumerate(entries):
        cache.insert(names, index, array("i", [block_id for entry in each for block_id in entry]))
    return cache, entries


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@given(data=st.data())
def test_a_match_is_the_longest_prefix_of_which_all_is_there_that_is_seen(groups, data):
    names = [BlockHash(bytes([number])) for number in range(24)]
    cache, entries = filled(groups, names)
    gone = [data.draw(st.sets(st.integers(0, 23), max_size=5)) for _ in groups]
    for index, missing in enumerate(gone):
        cache.forget([data.draw(st.sampled_from(entries[index][entry])) for entry in missing])
    most = data.draw(st.integers(0, 30))

    def seen(group: LayerGroup, num: int) -> range:
        return range(group.first_in_window(num * BLOCK) // BLOCK, num)

    for num in range(min(most, 24), -1, -1):
        if all(missing.isdisjoint(seen(group, num)) for group, missing in zip(groups, gone, strict=True)):
            break
    match = cache.match(names, most)
    assert match.num_entries == num
    for group, each, found in zip(groups, entries, match.ids, strict=True):
        assert [*found] == [block_id for entry in seen(group, num) for block_id in each[entry]]


class Counted(bytes):
    """A name that counts how often it is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def test_a_long_hit_looks_each_block_up_once_and_a_miss_few():
    names = [BlockHash(Counted(os.urandom(8))) for _ in range(4096)]
    cache, _ = filled(GROUPS["full"], names)
    Counted.looks = 0
    assert cache.match(names, 5000).num_entries == 4096
    assert Counted.looks <= 4096 + 13
    cache.forget([3000])
    Counted.looks = 0
    assert cache.match([*names], 5000).num_entries == 3000  # what is behind it is still there
    assert Counted.looks <= 4096 + 3000 + 2 * 13
    cache.clear()
    Counted.looks = 0
    assert cache.match([*names], 5000).num_entries == 0
    assert Counted.looks <= 13


@pytest.mark.parametrize("num", [1, 2 * MANY])
def test_which_blocks_are_cached_is_known_of_many_as_of_each(num):
    names = [BlockHash(os.urandom(8)) for _ in range(num)]
    cache, [entries] = filled(GROUPS["wide"], names)
    ids = [block_id for entry in entries for block_id in entry]
    asked = array("i", [*ids, 10_000])

    def known() -> list[bool]:
        each = cache.has_each(np.frombuffer(asked, np.int32)).tolist()
        assert each == [cache.has(block_id) for block_id in asked] == [block_id in cache for block_id in asked]
        return each

    assert known() == [True] * len(ids) + [False]
    cache.forget([entries[0][1]])  # and with it its whole entry
    assert known() == [False] * 3 + [True] * (len(ids) - 3) + [False]
    cache.insert(names[:1], 0, entries[0])
    assert known() == [True] * len(ids) + [False]
    cache.clear()
    assert known() == [False] * (len(ids) + 1)
