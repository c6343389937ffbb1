"""BlockPool, one block at a time and many at a time, against lists that say the same slowly."""

import random

import numpy as np
import pytest

from runtime.kv.block_pool import MANY, BlockPool

NUM_BLOCKS = 4 * MANY


class Names:
    """Which blocks are cached."""

    def __init__(self) -> None:
        self.named: set[int] = set()
        self.has = self.named.__contains__

    def has_each(self, block_ids):
        return np.fromiter(map(self.has, block_ids.tolist()), np.bool_, len(block_ids))


class Slow:
    """The pool's books: blank blocks, next one last; cached ones, next one first; how many use each of the others."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.blank = [*range(NUM_BLOCKS - 1, -1, -1)]
        self.cached: list[int] = []
        self.counts = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.num_freed = 0

    def allocate(self, num: int) -> list[int]:
        ids = [self.blank.pop() if self.blank else self.cached.pop(0) for _ in range(num)]
        self.share(ids)
        return ids

    def share(self, ids: list[int]) -> None:
        for block_id in ids:
            self.counts[block_id] += 1
        self.blank = [block_id for block_id in self.blank if not self.counts[block_id]]
        self.cached = [block_id for block_id in self.cached if not self.counts[block_id]]

    def release(self, ids: list[int]) -> None:
        for block_id in reversed(ids):
            self.counts[block_id] -= 1
            if not self.counts[block_id]:
                self.num_freed += 1
                (self.cached if self.names.has(block_id) else self.blank).append(block_id)


TURNS = ["take", "hit", "copy", "give", "end"]


@pytest.mark.parametrize("seed", range(12))
def test_blocks_come_and_go_in_the_order_of_their_lines(seed):
    rng = random.Random(seed)
    names = Names()
    pool, slow = BlockPool(NUM_BLOCKS), Slow(names)
    for turn in rng.choices(TURNS, (4, 4, 1, 4, 1), k=150):
        num = rng.choice((rng.randint(1, 4), rng.randint(1, NUM_BLOCKS)))
        used = [block_id for block_id, count in slow.counts.items() if count]
        match turn:
            case "take":
                num = min(num, pool.num_free)
                taken = pool.allocate(num)
                assert [*taken] == slow.allocate(num)
                names.named -= {*taken}
            case "hit":  # of cached blocks, from anywhere in their line, used or not
                hits = rng.sample([*names.named], min(num, len(names.named)))
                pool.share(hits)
                slow.share(hits)
            case "copy" if pool.num_free:  # what the target held is gone
                target = rng.choice(slow.blank + slow.cached)
                pool.share((target,))
                slow.share([target])
                names.named.discard(target)
            case "give":  # some become cached as they go
                given_back = rng.sample(used, min(num, len(used)))
                names.named |= {block_id for block_id in given_back if rng.random() < 0.7}
                pool.release(given_back, names)
                slow.release(given_back)
            case "end":
                while used := [block_id for block_id, count in slow.counts.items() if count]:
                    pool.release(used, names)
                    slow.release(used)
        assert (pool.num_free, pool.num_freed) == (len(slow.blank) + len(slow.cached), slow.num_freed)
        assert [pool.count(block_id) for block_id in range(NUM_BLOCKS)] == [*slow.counts.values()]
        ids = rng.sample(range(NUM_BLOCKS), min(num, NUM_BLOCKS))
        assert pool.num_idle(ids) == sum(not slow.counts[block_id] for block_id in ids)
    assert [*pool.allocate(pool.num_free)] == slow.blank[::-1] + slow.cached


@pytest.mark.parametrize("num", [1, MANY])
def test_blocks_that_are_hit_again_and_again_do_not_make_the_line_grow(num):
    names = Names()
    pool = BlockPool(NUM_BLOCKS)
    names.named.update(range(NUM_BLOCKS))
    pool.release(pool.allocate(NUM_BLOCKS), names)
    for _ in range(20 * NUM_BLOCKS // num):
        pool.share(range(num))
        pool.release(range(num), names)
        assert len(pool._line) <= 3 * NUM_BLOCKS + num
    assert [*pool.allocate(NUM_BLOCKS)] == [*range(NUM_BLOCKS - 1, num - 1, -1), *range(num - 1, -1, -1)]


@pytest.mark.parametrize("num", [1, MANY])
def test_what_nobody_used_cannot_be_given_back_and_what_is_promised_cannot_be_hit(num):
    names = Names()
    pool = BlockPool(NUM_BLOCKS)
    names.named.update(range(NUM_BLOCKS))
    with pytest.raises(RuntimeError, match="released more often than taken"):
        pool.release(range(num), names)
    pool = BlockPool(NUM_BLOCKS)
    pool.reserve(NUM_BLOCKS - num + 1)
    with pytest.raises(RuntimeError, match=f"{num} blocks asked, {num - 1} free and not reserved"):
        pool.share(range(num))
    assert pool.num_free == num - 1


def test_a_target_of_a_copy_leaves_the_blank_blocks():
    pool, names = BlockPool(NUM_BLOCKS), Names()
    targets = random.Random(1).sample(range(NUM_BLOCKS), MANY)
    pool.share(targets)
    pool.share(other := [next(block_id for block_id in range(NUM_BLOCKS) if block_id not in targets)])
    rest = pool.allocate(pool.num_free)
    assert sorted([*rest, *targets, *other]) == [*range(NUM_BLOCKS)]
    pool.release(targets, names)
    assert [*pool.allocate(MANY)] == targets


def test_the_pool_of_a_model_without_memory_is_never_full():
    assert BlockPool(0).usage == 0.0
    pool = BlockPool(4)
    pool.allocate(1)
    assert pool.usage == 0.25
