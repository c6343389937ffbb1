"""The scheduler and draft tokens: blocks are reserved as if all were right, and given back where they were not."""

from __future__ import annotations

import pytest

from runtime.api import FinishReason
from runtime.batch import NOT_FINITE, SAMPLE_MASKED, Sample
from runtime.constrain import deferred as deferred_sampling
from tests.invariants import check_pool
from tests.runtime.scheduling_case import EOS, GROUPS, Known, Memory, SomeDecode, batch_of, make, sequence


def test_drafts_are_reserved_for_as_if_all_were_right_and_what_they_did_not_bring_is_given_back():
    scheduler = make(proposer=Known([50, 51, 52]))
    seq = sequence(1, range(10, 16), max_tokens=20)
    scheduler.add(seq)
    first = scheduler.schedule()
    scheduler.settle(first, [[40]])
    (row,) = scheduler.schedule().rows
    assert (row.start, row.token_ids, row.draft_ids, row.num_tokens, row.work) == (6, (40,), (50, 51, 52), 4, Sample(3))
    assert (seq.num_computed_tokens, seq.num_in_flight, seq.num_tokens) == (10, 4, 11)
    (behind,) = scheduler.schedule().rows  # 10 is the greatest position that it can have
    assert (behind.start, behind.token_ids, behind.draft_ids, behind.num_tokens) == (10, (), (), 1)
    (settled,) = scheduler.settle(batch_of(row), [[50, 60]])
    assert (settled.token_ids, settled.finish) == ([50, 60], None)
    assert (seq.num_computed_tokens, seq.num_in_flight, seq.num_tokens) == (9, 1, 10)
    scheduler.settle(batch_of(behind), [[61]])
    assert seq.token_ids == [*range(10, 16), 40, 50, 60, 61]
    assert (seq.num_computed_tokens, seq.num_in_flight, seq.num_tokens) == (9, 0, 10)
    check_pool(scheduler)


def test_a_row_that_gained_nothing_computes_its_last_token_again():
    scheduler = make()
    seq = sequence(1, range(10, 16))
    scheduler.add(seq)
    assert scheduler.settle(scheduler.schedule(), [[]]) == []
    (again,) = scheduler.schedule().rows
    assert (again.start, again.token_ids, again.work) == (5, (15,), Sample())


def test_a_row_that_gained_more_than_it_could_is_a_bug():
    scheduler = make()
    scheduler.add(sequence(1, range(10, 16)))
    with pytest.raises(ValueError, match="2 tokens where 1 were reserved"):
        scheduler.settle(scheduler.schedule(), [[20, 21]])


@pytest.mark.parametrize(
    ("params", "gained", "counts", "finish"),
    [
        ({}, [50, EOS, 52, 60], [50, EOS], FinishReason.STOP),
        ({"stop_token_ids": frozenset({51})}, [50, 51, 52, 60], [50, 51], FinishReason.STOP),
        ({"max_tokens": 4}, [50, 51, 52], [50, 51, 52], FinishReason.LENGTH),
        ({}, [50, NOT_FINITE], [50], FinishReason.ERROR),
    ],
)
def test_a_sequence_may_end_in_the_middle_of_what_it_gained(params, gained, counts, finish):
    scheduler = make(proposer=Known([50, 51, 52]))
    seq = sequence(1, range(10, 16), **{"max_tokens": 20, **params})
    scheduler.add(seq)
    scheduler.settle(scheduler.schedule(), [[40]])
    (settled,) = scheduler.settle(scheduler.schedule(), [gained])
    assert (settled.token_ids, settled.finish) == (counts, finish)
    assert seq.token_ids == [*range(10, 16), 40, *counts]
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks
    assert scheduler.schedule() is None


def test_no_draft_lies_beyond_the_last_token():
    scheduler = make(proposer=Known([50] * 9))
    scheduler.add(sequence(1, range(10, 16), max_tokens=4))
    scheduler.settle(scheduler.schedule(), [[40]])
    (row,) = scheduler.schedule().rows
    assert len(row.draft_ids) == 2  # and one more is sampled behind them
    assert scheduler.schedule() is None


def test_a_sequence_waits_for_its_ids_where_there_is_a_guess_and_goes_on_where_there_is_none():
    scheduler = make(proposer=Known([], [30], [31, 32]))
    scheduler.add(sequence(1, range(10, 16), max_tokens=20))
    first = scheduler.schedule()
    second = scheduler.schedule()  # no guess
    assert second.rows[0].token_ids == ()
    scheduler.settle(first, [[40]])
    assert scheduler.schedule() is None
    scheduler.settle(second, [[41]])
    (row,) = scheduler.schedule().rows
    assert (row.token_ids, row.draft_ids) == ((41,), (31, 32))


def test_drafts_cost_nobody_a_block_and_no_decode_its_turn():
    scheduler = make(num_blocks=4, budget=8, proposer=Known([50, 51], [52, 53]))
    first, second = sequence(1, range(10, 13), max_tokens=5), sequence(2, range(20, 23), max_tokens=5)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.settle(scheduler.schedule(), [[40], [41]])
    rows = scheduler.schedule().rows  # two blocks are left, one each for the drafts
    assert [len(row.draft_ids) for row in rows] == [2, 2]
    full = make(num_blocks=3, budget=8, proposer=Known([50, 51], [52, 53]))
    full.add(sequence(1, range(10, 13), max_tokens=5))
    full.add(sequence(2, range(20, 23), max_tokens=5))
    batch = full.schedule()
    assert len(batch.rows) == 2
    full.settle(batch, [[40], [41]])
    assert [len(row.draft_ids) for row in full.schedule().rows] == [2, 0]
    assert full.sequences.num_preemptions == 0
    narrow = make(budget=7, proposer=Known([50] * 9, [51] * 9, [52] * 9))
    for number in (1, 2, 3):
        narrow.add(sequence(number, [10 + number], max_tokens=20))
    narrow.settle(narrow.schedule(), [[40], [41], [42]])
    assert [row.num_tokens for row in narrow.schedule().rows] == [5, 1, 1]


def test_a_step_for_the_narrowest_has_neither_prompts_nor_rows_of_others():
    alone = iter([False, True, True, False])
    scheduler = make(budget=8, seqs=6, step_budget=SomeDecode(4, room=lambda: 9, for_narrowest=lambda: next(alone)))
    memory = Memory(scheduler)

    def numbers() -> list[int]:
        batch = scheduler.schedule()
        scheduler.settle(batch, *memory.run(batch))
        return [row.number for row in batch.rows]

    scheduler.add(sequence(1, [10], max_tokens=20, caller=b"one"))
    assert [numbers(), numbers()] == [[1], [1]]  # nobody is beside it
    for number in (2, 3):
        scheduler.add(sequence(number, [10 + number], max_tokens=20, caller=b"many", group=7))
    scheduler.add(sequence(4, range(10, 30), max_tokens=20, caller=b"many"))
    assert numbers() == [1, 2, 3]
    assert [numbers(), numbers()] == [[1], [1]]
    assert numbers() == [1, 2, 3, 4]


@pytest.mark.parametrize("groups", [GROUPS["states"], GROUPS["states beside keys"]])
def test_what_a_state_has_read_wrongly_is_read_again_from_a_copy_of_it(groups):
    scheduler = make(proposer=Known([50, 51, 52], [60]), groups=groups, caching=False)
    scheduler.add(seq := sequence(1, range(10, 16), max_tokens=20))
    scheduler.settle(scheduler.schedule(), [[40]])
    drafted = scheduler.schedule()
    states = [block_id for table in seq.tables if table.group.state for block_id in table.ids]
    assert [copy.source for copy in drafted.copies] == states
    assert scheduler.schedule() is None  # nobody knows yet where it goes on
    scheduler.settle(drafted, [[50, 55]])
    assert (seq.num_computed_tokens, seq.output_ids) == (6, [40, 50, 55])
    batch = scheduler.schedule()
    (row,) = batch.rows
    assert (row.restart, row.start, row.token_ids, row.draft_ids, row.work) == (6, 6, (40, 50, 55), (60,), Sample(1))
    taken = [
        block_id for new in row.new_blocks if scheduler.blocks.cache.groups[new.group].state for block_id in new.ids
    ]
    assert taken == [copy.target for copy in drafted.copies]
    check_pool(scheduler)
    scheduler.settle(batch, [[60, 61]])
    (row,) = scheduler.schedule().rows  # all were right: it goes on where it is
    assert (row.restart, row.start, row.token_ids) == (-1, 10, (61,))
    scheduler.finish(seq, FinishReason.ABORT)
    scheduler.settle(batch_of(row), [[70]])
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks


def test_where_there_is_no_block_for_the_copy_of_a_state_there_are_no_drafts():
    scheduler = make(1, proposer=Known([50, 51]), groups=GROUPS["states"], caching=False)
    scheduler.add(sequence(1, range(10, 16), max_tokens=20))
    scheduler.settle(scheduler.schedule(), [[40]])
    assert scheduler.schedule().rows[0].draft_ids == ()


def test_a_state_with_matchers_is_given_no_drafts():
    scheduler = make(proposer=Known([50, 51]), groups=GROUPS["states"], caching=False)
    scheduler.add(sequence(1, range(10, 16), max_tokens=20, matchers=(lambda: None,)))
    scheduler.settle(scheduler.schedule(), [[40]])
    assert scheduler.schedule().rows[0].draft_ids == ()


def test_a_row_with_matchers_and_drafts_waits_for_masks_and_keeps_no_draft_where_they_are_late():
    scheduler = make(proposer=Known([50, 51]))
    scheduler.add(first := sequence(1, range(10, 16), max_tokens=20, matchers=(lambda: None,)))
    scheduler.settle(scheduler.schedule(), [[40]])
    batch = scheduler.schedule()
    assert batch.rows[0].work == Sample(2, masked=True)
    rest, sampling = batch.split({batch.rows[0].row})
    deferred = deferred_sampling.defer(scheduler, sampling)
    assert scheduler.settle(rest, []) == []
    assert scheduler.schedule() is None
    (row,) = deferred.rows
    assert (row.start, row.num_tokens, row.draft_ids, row.work) == (6, 1, (), SAMPLE_MASKED)
    assert deferred_sampling.is_current(scheduler, row)
    deferred_sampling.resume(scheduler, deferred)
    scheduler.settle(deferred, [[41]])
    assert first.output_ids == [40, 41]
    assert (first.num_computed_tokens, first.num_tokens) == (7, 8)


def test_a_rejected_draft_is_no_prefix_of_anybody():
    scheduler = make(proposer=Known([50, 51, 52, 53]))
    first = sequence(1, range(10, 13), max_tokens=20)
    scheduler.add(first)
    scheduler.settle(scheduler.schedule(), [[40]])
    scheduler.settle(scheduler.schedule(), [[60]])
    scheduler.settle(scheduler.schedule(), [[61]])
    scheduler.finish(first, FinishReason.STOP)
    guessed, right = sequence(2, [10, 11, 12, 40, 50, 51, 52, 53, 9]), sequence(3, [10, 11, 12, 40, 60, 61, 9])
    scheduler.add(guessed)
    scheduler.add(right)
    assert [row.start for row in scheduler.schedule().rows] == [4, 4]
