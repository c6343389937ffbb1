"""The scheduler and cached blocks: prefixes, windows, states and copies."""

from __future__ import annotations

import pytest

from runtime.api import FinishReason
from runtime.batch import BlockCopy
from runtime.kv.block_pool import BlockPool
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from tests.invariants import check_pool, check_tables
from tests.pooling import OF_ALL
from tests.runtime.scheduling_case import (
    BLOCK,
    EOS,
    GROUPS,
    STATE,
    Memory,
    cached,
    expected,
    idle_blocks,
    make,
    pooling_sequence,
    run_to_end,
    sequence,
)


def test_a_window_keeps_no_more_blocks_than_it_shows_and_a_step_adds():
    scheduler = make(num_blocks=9, budget=7, groups=GROUPS["windows"])
    memory = Memory(scheduler)
    seq = sequence(1, range(10, 60), max_tokens=150, limit=200)
    scheduler.add(seq)
    most = 0
    while (batch := scheduler.schedule()) is not None:
        most = max(most, len(seq.tables[0].ids))
        held = len(seq.tables[0].ids)
        scheduler.settle(batch, *memory.run(batch))
    assert seq.token_ids == expected(seq)
    assert most == 5  # 8 seen and 7 new, wherever they begin in a block of 4
    assert held == 3


def test_a_state_takes_the_same_blocks_however_long_its_sequence():
    scheduler = make(num_blocks=6, budget=7, groups=(LayerGroup(STATE, 3),))
    memory = Memory(scheduler)
    first, second, third = (sequence(number, range(10, 60), max_tokens=150, limit=200) for number in range(3))
    for seq in (first, second, third):
        scheduler.add(seq)
    run_to_end(scheduler, memory, max_steps=1000)
    assert [seq.token_ids == expected(seq) for seq in (first, second, third)] == [True] * 3
    assert scheduler.sequences.num_preemptions == 0


@pytest.mark.parametrize("groups", [GROUPS["windows"], GROUPS["hybrid"], GROUPS["three reaches"]])
def test_a_prefix_is_hit_wherever_prompts_part_though_windows_moved_on(groups):
    scheduler = make(num_blocks=128, budget=8, groups=groups)
    prompt = list(range(10, 50))
    assert cached(scheduler, Memory(scheduler), prompt, prompt, prompt[:22], [*prompt[:13], 77, 78]) == [0, 36, 20, 12]


def test_a_window_s_blocks_alone_are_a_hit_when_all_layers_have_windows():
    scheduler = make(num_blocks=5, budget=8, groups=GROUPS["windows"])
    prompt = list(range(10, 50))
    assert cached(scheduler, Memory(scheduler), prompt, prompt, prompt[:21]) == [0, 36, 0]


def test_a_prefix_whose_window_is_gone_is_no_hit_for_those_that_see_everything_either():
    scheduler = make(num_blocks=128, budget=64, groups=GROUPS["hybrid"])
    memory = Memory(scheduler)
    prompt = list(range(10, 40))  # seven full entries, of which a window of 6 shows the last two
    assert cached(scheduler, memory, prompt, prompt) == [0, 28]
    second = scheduler.blocks.cache._blocks_of[1][1]
    block_hashes = scheduler.blocks.cache.hash_blocks(prompt)
    scheduler.blocks.cache.forget([second[block_hashes[5]]])  # of three
    assert cached(scheduler, memory, prompt[:21]) == [20]
    assert cached(scheduler, memory, prompt) == [20]


def test_a_prompt_cached_by_one_is_hit_by_the_next_in_the_same_step():
    scheduler = make(budget=64)
    prompt = list(range(20, 37))
    first, second = sequence(1, prompt), sequence(2, prompt)
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert [row.num_tokens for row in batch.rows] == [17, 1]
    assert second.num_cached_tokens == 16
    assert first.tables[0].ids[:4] == second.tables[0].ids[:4]


def test_at_least_one_token_is_computed_however_much_is_cached():
    scheduler = make(budget=64)
    prompt = list(range(20, 36))  # exactly four blocks
    for number in (1, 2):
        scheduler.add(sequence(number, prompt))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [16, 4]


def test_a_salt_keeps_prefixes_apart():
    scheduler = make(budget=64)
    prompt = list(range(20, 37))
    for number, salt in enumerate([None, "a", "b", "a"]):
        scheduler.add(sequence(number, prompt, salt=salt))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [17, 17, 17, 1]


def test_the_tail_of_a_finished_sequence_is_evicted_before_its_head():
    scheduler = make(num_blocks=6, budget=64)
    memory = Memory(scheduler)
    old = sequence(1, range(20, 40), max_tokens=1)  # five blocks
    scheduler.add(old)
    run_to_end(scheduler, memory)
    scheduler.add(sequence(2, range(50, 61), max_tokens=1))  # three blocks: one blank, two evicted
    run_to_end(scheduler, memory)
    again = sequence(3, range(20, 40), max_tokens=1)
    scheduler.add(again)
    run_to_end(scheduler, memory)
    assert again.num_cached_tokens == 3 * BLOCK
    assert again.token_ids == expected(again)


def test_a_failed_step_leaves_nothing_to_hit_and_the_rest_starts_over():
    scheduler = make(num_blocks=32, budget=20)
    memory = Memory(scheduler)
    prompt = list(range(20, 38))
    first, second = sequence(1, prompt, 6), sequence(2, [*prompt, 50], 6)
    scheduler.add(first)
    failed = scheduler.schedule()
    scheduler.add(second)
    behind = scheduler.schedule()  # reads blocks that the failed step was to write
    assert {row.number for row in behind.rows} == {1, 2}
    scheduler.finish(first, FinishReason.ERROR)
    scheduler.forget_step([failed, behind])
    run_to_end(scheduler, memory)
    assert second.token_ids == expected(second)


def test_blocks_of_a_copy_are_nobody_else_s_until_its_step_has_settled():
    scheduler = make(num_blocks=8)
    seq = sequence(1, range(10, 16), max_tokens=1)
    scheduler.add(seq)
    first = scheduler.schedule()
    source, target = seq.tables[0].ids[0], idle_blocks(scheduler)[0]
    scheduler.blocks.copies.add(source, target)
    check_pool(scheduler)
    scheduler.settle(first, [[40]])
    assert (scheduler.blocks.pool.count(source), scheduler.blocks.pool.count(target)) == (1, 1)
    batch = scheduler.schedule()  # no row can advance, and the copy need not wait for one
    assert (batch.rows, batch.copies) == ((), (BlockCopy(source, target),))
    assert scheduler.schedule() is None
    check_pool(scheduler)
    scheduler.settle(batch, [])
    assert scheduler.blocks.pool.num_free == 8
    scheduler.blocks.copies.add(source, target)
    scheduler.forget_step([scheduler.schedule()])
    assert scheduler.blocks.pool.num_free == 8


def test_a_copy_ends_what_its_target_was_known_to_hold():
    scheduler = make(num_blocks=8)
    memory = Memory(scheduler)
    prompt = list(range(20, 37))
    assert cached(scheduler, memory, prompt, prompt) == [0, 16]
    target = scheduler.blocks.cache._blocks_of[0][0][scheduler.blocks.cache.hash_blocks(prompt)[2]]
    scheduler.blocks.copies.add(idle_blocks(scheduler)[0], target)
    assert cached(scheduler, memory, prompt) == [8]


def test_where_layers_keep_nothing_nothing_is_looked_for(monkeypatch):
    """Thousands of short texts: to ask for what cannot be there took a fifth of the host's time for each."""
    limits = SchedulerLimits(2, 10, frozenset({EOS}), in_one_step=True)
    scheduler = Scheduler(limits, BlockPool(0), PrefixCache(BLOCK, False, GROUPS["nothing"]), POLICIES["fcfs"]())
    monkeypatch.setattr(PrefixCache, "match", lambda *asked: pytest.fail("nothing can be found"))
    for number in (1, 2, 3):
        scheduler.add(pooling_sequence(number, range(5, 9), params=OF_ALL))
    for numbers in ([1, 2], [3]):
        batch = scheduler.schedule()
        assert [row.number for row in batch.rows] == numbers
        check_tables(scheduler)
        scheduler.settle(batch, [], [memoryview(b"....").cast("f")] * len(numbers))
    check_pool(scheduler)


def test_what_is_cached_is_hit_until_a_promised_block_is_taken():
    scheduler = make(num_blocks=8, budget=8)
    memory = Memory(scheduler)
    old = list(range(50, 67))  # four full blocks, which the last chunk of the next prompt would need one of
    cached(scheduler, memory, old)
    long = sequence(1, range(10, 34), max_tokens=1)
    scheduler.add(long)
    scheduler.schedule()
    block_hashes = scheduler.blocks.cache.hash_blocks(old)
    assert scheduler.blocks.cache.match(block_hashes, 4).num_entries == 4
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.blocks.cache.match(block_hashes, 4).num_entries == 2
