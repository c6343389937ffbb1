"""The scheduler alone: who starts, what a step holds, who is preempted, how sequences end."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import FinishReason
from runtime.batch import NOT_FINITE, Pool, Sample, ScheduledBatch
from runtime.constrain import deferred as deferred_sampling
from runtime.kv.block_pool import BlockPool
from runtime.kv.kinds import Nothing
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence, SequenceStatus
from tests.invariants import check_pool, check_tables
from tests.pooling import LAST, OF_ALL, POOLING
from tests.runtime.scheduling_case import (
    BLOCK,
    EOS,
    GROUPS,
    Guesses,
    Memory,
    SomeDecode,
    cached,
    expected,
    expected_end,
    idle_blocks,
    make,
    note_prompt_logprobs,
    pooling_sequence,
    resume,
    run_to_end,
    sequence,
    state_blocks,
    vector_of,
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [64, 16, 5])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("plenty", [True, False], ids=["plenty of blocks", "few blocks"])
def test_every_sequence_reads_its_own_tokens_whatever_the_chunks_and_blocks(plenty, groups, budget, caching, depth):
    least = sum(group.max_blocks(33, budget, BLOCK) for group in groups)
    num_blocks = 64 * sum(group.width for group in groups) if plenty else least
    scheduler = make(num_blocks, seqs=4, budget=budget, caching=caching, groups=groups)
    memory = Memory(scheduler)
    rng = random.Random(1)
    shared = [rng.randrange(10, 90) for _ in range(13)]
    sequences = [sequence(n, [*shared[: rng.randrange(1, 14)], n], 12, limit=33) for n in range(12)]
    for seq in sequences:
        scheduler.add(seq)
    run_to_end(scheduler, memory, depth)
    for seq in sequences:
        assert seq.token_ids == expected(seq)
        assert seq.finish is FinishReason.LENGTH
    # Where all layers have windows, states or nothing a sequence hardly ever has more blocks than it starts with.
    assert (scheduler.sequences.num_preemptions > 0) == (not plenty) or groups in (
        GROUPS["windows"], GROUPS["states"], GROUPS["nothing"],
    )  # fmt: skip


def test_decodes_keep_their_token_while_a_long_prompt_is_computed():
    scheduler = make(budget=8, seqs=4, policy="priority")
    memory = Memory(scheduler)
    small = [sequence(n, [n + 20], max_tokens=30, priority=1) for n in range(3)]
    for seq in small:
        scheduler.add(seq)
    scheduler.settle((batch := scheduler.schedule()), *memory.run(batch))
    scheduler.add(sequence(9, range(20, 60), priority=0))
    for _ in range(5):
        batch = scheduler.schedule()
        assert {row.number for row in batch.rows} == {0, 1, 2, 9}
        assert batch.num_tokens == 8
        scheduler.settle(batch, *memory.run(batch))


def test_priority_goes_first_and_arrival_breaks_ties():
    scheduler = make(seqs=1, budget=16, policy="priority")
    memory = Memory(scheduler)
    order = []
    for number, prio in enumerate([5, 1, 1, 0]):
        scheduler.add(sequence(number, [30 + number], max_tokens=1, priority=prio))
    while (batch := scheduler.schedule()) is not None:
        order += [settled.sequence.number for settled in scheduler.settle(batch, *memory.run(batch))]
    assert order == [3, 1, 2, 0]


def test_the_last_in_line_is_preempted_and_still_answers_exactly():
    scheduler = make(num_blocks=6, budget=32)
    memory = Memory(scheduler)
    first, second = sequence(1, range(20, 28), 12, limit=24), sequence(2, range(40, 44), 12, limit=24)
    scheduler.add(first)
    scheduler.add(second)
    run_to_end(scheduler, memory)
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    assert (first.token_ids, second.token_ids) == (expected(first), expected(second))


@pytest.mark.parametrize(
    ("params", "finish"),
    [({}, FinishReason.STOP), ({"ignore_eos": True}, None), ({"stop_token_ids": frozenset({50})}, FinishReason.STOP)],
)
def test_a_token_too_many_computed_ahead_is_dropped(params, finish):
    scheduler = make()
    seq = sequence(1, [20], max_tokens=9, **params)
    scheduler.add(seq)
    first, second = scheduler.schedule(), scheduler.schedule()
    token = 50 if "stop_token_ids" in params else EOS
    (settled,) = scheduler.settle(first, [[token]])
    assert settled.finish is finish
    late = scheduler.settle(second, [[33]])
    assert bool(late) == (finish is None)
    assert seq.token_ids == [20, token] + ([33] if finish is None else [])
    check_pool(scheduler)


def test_unusable_logits_end_their_own_row_only():
    scheduler = make()
    good, bad = sequence(1, [20]), sequence(2, [21])
    scheduler.add(good)
    scheduler.add(bad)
    settled = scheduler.settle(scheduler.schedule(), [[33], [NOT_FINITE]])
    assert [(s.sequence, s.token_ids, s.finish, s.place) for s in settled] == [
        (good, [33], None, 0),
        (bad, [], FinishReason.ERROR, 1),
    ]
    check_pool(scheduler)


def test_a_held_draw_is_void_once_its_sequence_has_another_row():
    scheduler = make(seqs=2)
    first, second = sequence(1, [20]), sequence(2, [30])
    scheduler.add(first)
    scheduler.add(second)
    _, draws = scheduler.schedule().split({0, 1})
    deferred_sampling.defer(scheduler, draws)
    assert [deferred_sampling.is_current(scheduler, row) for row in draws.rows] == [True, True]
    assert scheduler.schedule() is None
    scheduler.sequences.preempt(first)
    scheduler.sequences.preempt(second)
    _, again = scheduler.schedule().split({0, 1})
    deferred_sampling.defer(scheduler, again)
    assert [row.row for row in draws.rows] == [row.row for row in again.rows][::-1]
    assert [deferred_sampling.is_current(scheduler, row) for row in draws.rows] == [False, False]
    assert [deferred_sampling.is_current(scheduler, row) for row in again.rows] == [True, True]


def test_a_prompt_to_be_scored_is_computed_whole_though_it_is_cached():
    scheduler = make(budget=64)
    prompt = list(range(20, 37))
    for number, count in enumerate([None, 1, None]):
        scheduler.add(sequence(number, prompt, prompt_logprobs=count))
    batch = scheduler.schedule()
    assert [row.num_tokens for row in batch.rows] == [17, 17, 1]
    (row,) = batch.prompt_logprobs_rows
    assert (row.prompt_logprobs.start, row.prompt_logprobs.token_ids) == (1, tuple(prompt[1:]))


def test_prompt_logprobs_that_have_gone_out_are_not_computed_again():
    scheduler = make(budget=9, num_blocks=32)
    memory = Memory(scheduler)
    seq = sequence(1, range(20, 40), prompt_logprobs=0)
    scheduler.add(seq)
    positions: dict[int, list[int]] = {}
    first = scheduler.schedule()
    note_prompt_logprobs(scheduler, first, positions)
    scheduler.settle(first, *memory.run(first))
    scheduler.sequences.preempt(seq)
    again = scheduler.schedule()
    assert again.rows[0].start == 8  # two blocks are cached, and token 9 is what token 10 is told by
    note_prompt_logprobs(scheduler, again, positions)
    scheduler.settle(again, *memory.run(again))
    run_to_end(scheduler, memory, positions=positions)
    assert positions == {1: list(range(1, 20))}


def test_a_prompt_to_be_computed_only_ends_with_its_last_token_and_may_fill_the_context():
    scheduler = make(budget=16)
    memory = Memory(scheduler)
    seq = sequence(1, range(20, 44), max_tokens=0, limit=24)
    scheduler.add(seq)
    run_to_end(scheduler, memory)
    assert (seq.finish, seq.num_output_tokens) == (FinishReason.LENGTH, 0)


def test_a_budget_that_cannot_serve_all_rows_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerLimits(8, 8, frozenset())


@given(
    seed=st.integers(0, 2**32),
    spare_blocks=st.integers(0, 32),
    groups=st.sampled_from(list(GROUPS.values())),
    seqs=st.integers(1, 6),
    budget=st.integers(7, 40),
    policy=st.sampled_from(list(POLICIES)),
    caching=st.booleans(),
    depth=st.integers(1, 3),
    drafts=st.integers(0, 4),
    mixed=st.sampled_from([None, 1, 3, 8]),
    turns=st.booleans(),
    stages=st.integers(1, 3),
)
def test_blocks_balance_and_texts_are_right_under_any_mix_of_arrivals_aborts_drafts_copies_late_masks_and_failures(
    seed, spare_blocks, groups, seqs, budget, policy, caching, depth, drafts, mixed, turns, stages
):
    rng = random.Random(seed)
    num_blocks = sum(group.max_blocks(32, budget, BLOCK) for group in groups) + spare_blocks
    proposer = Guesses(rng, drafts) if drafts else None
    step_budget = None
    if turns:
        step_budget = SomeDecode(mixed, room=lambda: rng.randrange(4), for_narrowest=lambda: rng.random() < 0.1)
    scheduler = make(num_blocks, seqs, budget, policy, caching, mixed, groups, proposer, step_budget, stages)
    has_states = any(group.state for group in groups)
    memory = Memory(scheduler, lambda: drafts > 0 and not has_states and rng.random() < 0.05)
    alive: list[Sequence] = []
    positions: dict[int, list[int]] = {}
    pooled: dict[int, list[int]] = {}
    in_flight: deque = deque()
    copied: dict[int, list] = {}  # what each target of a copy under way holds
    held: list[ScheduledBatch] = []
    number = 0

    def settle_oldest() -> None:
        batch, tokens, vectors = in_flight.popleft()
        note_prompt_logprobs(scheduler, batch, positions)
        for copy in batch.copies:
            assert copied.pop(copy.target, memory.blocks[copy.target]) == memory.blocks[copy.target]
        for settled in scheduler.settle(batch, tokens, vectors):
            if settled.pooled is not None:
                pooled[settled.sequence.number] = settled.pooled
            if settled.token_ids:
                assert settled.token_ids == expected_end(settled.sequence, len(settled.token_ids))

    for _ in range(200):
        if rng.random() < 0.4:
            number += 1
            prompt = [10 + i % 5 for i in range(rng.randrange(1, 20))] + [rng.randrange(10, 14)]
            salt, count = rng.choice([None, "x"]), rng.choice([None, None, 1])
            if rng.random() < 0.15:
                seq = pooling_sequence(number, prompt, rng.randrange(3), salt, (POOLING, OF_ALL)[number % 2])
            else:
                priority = rng.randrange(3)
                caller = rng.choice([None, b"a", b"b"])
                group = rng.choice([None, 0])
                params = {"group": group, "prompt_logprobs": count}
                seq = sequence(number, prompt, rng.randrange(12), priority, salt, 32, caller, **params)
            alive.append(seq)
            scheduler.add(seq)
        if alive and rng.random() < 0.1:
            victim = alive.pop(rng.randrange(len(alive)))
            if victim.status is not SequenceStatus.FINISHED:
                scheduler.finish(victim, FinishReason.ABORT)
        if scheduler.running and scheduler.blocks.pool.num_free and rng.random() < 0.1:
            held_ids = [block_id for table in rng.choice(scheduler.running).tables for block_id in table.ids]
            if held_ids:  # layers without memory take none
                scheduler.blocks.copies.add(rng.choice(held_ids), rng.choice(idle_blocks(scheduler)))
        batch = scheduler.schedule()
        if batch is not None:
            assert batch.num_tokens <= budget
            if not in_flight:  # as it is when the engine asks for masks
                late = {
                    row.row
                    for row in batch.sampling_rows
                    if rng.random() < 0.2 and not (has_states and row.draft_ids)  # states with matchers have none
                }
                batch, sampling = batch.split(late)
                held.append(deferred_sampling.defer(scheduler, sampling))
                in_flight.append((batch, *memory.run(batch)))
                memory.give_up_drafts(sampling)
            else:
                in_flight.append((batch, *memory.run(batch)))
            targets = {copy.target for copy in batch.copies} - state_blocks(scheduler)  # which the next step changes
            copied.update({target: list(memory.blocks[target]) for target in targets})
        if rng.random() < 0.3:
            resume(scheduler, memory, held, in_flight, 0.5, rng)
        check_pool(scheduler)
        check_tables(scheduler, drafting=drafts > 0)
        if in_flight and rng.random() < 0.03:
            for row in in_flight[0][0].rows:
                if (victim := scheduler.sequences.find(row.number)) is not None:
                    scheduler.finish(victim, FinishReason.ERROR)
            scheduler.forget_step([batch for batch, *_ in in_flight])
            in_flight.clear()
            copied.clear()
        if in_flight and batch is None:
            settle_oldest()
        while len(in_flight) >= depth:
            settle_oldest()
    resume(scheduler, memory, held, in_flight, 1.0, rng)
    while in_flight:
        settle_oldest()
    memory.skips = lambda: False
    run_to_end(scheduler, memory, depth, positions)
    for seq in alive:
        if seq.finish is FinishReason.LENGTH:
            assert seq.token_ids == expected(seq)
            wanted = [] if seq.sampling.prompt_logprobs is None else list(range(1, seq.num_prompt_tokens))
            assert positions.get(seq.number, []) == wanted
        if seq.number in pooled:
            assert seq.finish is FinishReason.STOP
            assert pooled[seq.number] == vector_of(list(seq.prompt_ids))
        assert seq.status is SequenceStatus.FINISHED
    assert scheduler.blocks.pool.num_free == num_blocks
    assert all(scheduler.blocks.pool.count(block_id) == 0 for block_id in range(num_blocks))


def test_a_prompt_is_pooled_with_its_last_chunk_and_ends_with_its_vector():
    scheduler = make(budget=8)
    seq, other, bad = pooling_sequence(1, range(20, 30)), sequence(2, [9], max_tokens=3), pooling_sequence(3, [5])
    for each in (seq, other, bad):
        scheduler.add(each)
    first = scheduler.schedule()
    assert [(row.number, row.work) for row in first.rows] == [(1, None)]
    second = scheduler.schedule()
    assert [(row.number, row.work) for row in second.rows] == [(1, LAST), (2, Sample()), (3, LAST)]
    third = scheduler.schedule()
    assert [row.number for row in third.rows] == [2]  # nothing is left to compute for the others
    assert scheduler.settle(first, []) == []
    settled = scheduler.settle(second, [[40]], [[0.5, 1.5], None])
    assert [(s.sequence, s.token_ids, s.finish, s.pooled) for s in settled] == [
        (other, [40], None, None),
        (seq, [], FinishReason.STOP, [0.5, 1.5]),
        (bad, [], FinishReason.ERROR, None),
    ]
    check_pool(scheduler)


def test_a_prompt_that_must_be_whole_waits_for_a_step_that_holds_it_and_is_not_overtaken():
    limits = SchedulerLimits(8, 10, frozenset({EOS}), in_one_step=True)
    groups = (LayerGroup(Nothing()),)
    scheduler = Scheduler(limits, BlockPool(0), PrefixCache(BLOCK, False, groups), POLICIES["fcfs"]())
    for number, length in enumerate((4, 5, 10, 1, 2), start=1):
        scheduler.add(pooling_sequence(number, range(5, 5 + length), params=OF_ALL))
    steps = [scheduler.schedule() for _ in range(4)]
    assert [[(row.number, row.num_tokens) for row in batch.rows] for batch in steps[:3]] == [
        [(1, 4), (2, 5)],
        [(3, 10)],
        [(4, 1), (5, 2)],
    ]
    assert steps[3] is None
    assert all(row.work == Pool(OF_ALL) for batch in steps[:3] for row in batch.rows)
    for batch in steps[:3]:
        scheduler.settle(batch, [], [memoryview(b"....").cast("f")] * len(batch.rows))
    assert not scheduler.running


def test_blocks_of_a_prompt_are_promised_at_once_taken_step_by_step_and_nobody_else_s_meanwhile():
    scheduler = make(num_blocks=8, budget=8)
    memory = Memory(scheduler)
    cached(scheduler, memory, range(50, 61))  # two blocks hold what may be asked for again
    long, other = sequence(1, range(10, 34), max_tokens=1), sequence(2, range(50, 61), max_tokens=1)
    scheduler.add(long)
    first = scheduler.schedule()
    assert (len(long.tables[0].ids), scheduler.blocks.pool.num_reserved, scheduler.blocks.pool.num_free) == (2, 4, 2)
    scheduler.blocks.pool.share([(idle := idle_blocks(scheduler))[0]])
    with pytest.raises(RuntimeError, match="2 blocks asked, 1 free and not reserved"):
        scheduler.blocks.pool.share(idle[1:3])
    with pytest.raises(RuntimeError, match="2 blocks asked, 1 free and not reserved"):
        scheduler.blocks.pool.allocate(2)
    scheduler.blocks.pool.release(idle[:1], scheduler.blocks.cache)
    scheduler.add(other)
    second = scheduler.schedule()
    assert [row.number for row in second.rows] == [1]
    assert (len(long.tables[0].ids), scheduler.blocks.pool.num_reserved) == (4, 2)
    scheduler.finish(long, FinishReason.ABORT)  # what it was promised and had not taken is free again
    assert (scheduler.blocks.pool.num_reserved, scheduler.blocks.pool.num_free) == (0, 8)
    for batch in (first, second):
        scheduler.settle(batch, *memory.run(batch))
    run_to_end(scheduler, memory)
    assert (other.num_cached_tokens, other.token_ids) == (8, expected(other))


def test_a_sequence_that_was_refused_is_looked_at_again_once_a_block_has_become_free():
    scheduler = make(num_blocks=8, budget=64)
    memory = Memory(scheduler)
    hits = list(range(50, 67))
    cached(scheduler, memory, hits)
    running, waiting = sequence(1, range(10, 25), max_tokens=2), sequence(2, [*hits, *range(70, 80)], max_tokens=1)
    for each in (running, waiting):
        scheduler.add(each)
    first = scheduler.schedule()
    refusal = scheduler.blocks._refusal
    second = scheduler.schedule()
    assert scheduler.blocks._refusal is refusal is not None
    assert waiting.status is SequenceStatus.WAITING
    scheduler.settle(first, *memory.run(first))
    scheduler.settle(second, *memory.run(second))
    assert [row.number for row in scheduler.schedule().rows] == [2]
    assert scheduler.blocks._refusal is None


def test_a_sequence_starts_only_where_every_running_one_keeps_a_block_to_grow_into():
    scheduler = make(num_blocks=3, budget=16)
    running, waiting = sequence(1, range(10, 14), max_tokens=3), sequence(2, range(20, 28))
    scheduler.add(running)
    scheduler.add(waiting)
    first = scheduler.schedule()
    assert [row.number for row in first.rows] == [1]  # two blocks are free, and two are what the other needs
    scheduler.settle(first, [[40]])
    (row,) = scheduler.schedule().rows
    assert (row.number, scheduler.sequences.num_preemptions) == (1, 0)


def test_a_preempted_sequence_is_not_admitted_while_an_id_of_it_is_in_flight():
    scheduler = make()
    seq = sequence(1, range(10, 16), max_tokens=5)
    scheduler.add(seq)
    first = scheduler.schedule()
    scheduler.sequences.preempt(seq)
    assert scheduler.schedule() is None
    scheduler.settle(first, [[40]])
    (row,) = scheduler.schedule().rows
    assert (row.start + row.num_tokens, row.binding.output_ids) == (7, (40,))


def calls(work: Callable[[], object]) -> int:
    """Of functions written in Python. Without collections, whose callbacks are some too."""
    num = 0

    def note(_frame, event, _arg) -> None:
        nonlocal num
        num += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num


def test_a_decoded_token_costs_two_calls_from_its_schedule_to_its_settling():
    """One to advance its row, one to make that."""

    def of_step(num_rows: int) -> int:
        scheduler = make(num_blocks=1000, seqs=num_rows, budget=1000)
        for number in range(num_rows):
            scheduler.add(sequence(number, [number + 10], max_tokens=9))
        first, tokens = scheduler.schedule(), [[50]] * num_rows
        found = calls(lambda: (scheduler.schedule(), scheduler.settle(first, tokens)))
        assert all(seq.output_ids == [50] for seq in scheduler.running)
        return found

    assert of_step(100) - of_step(40) == 60 * 2
