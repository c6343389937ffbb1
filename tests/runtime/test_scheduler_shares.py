"""Shares of a step: prompts beside streams, and turns of pipeline stages."""

from __future__ import annotations

from collections import deque

import pytest

from runtime.constrain import deferred as deferred_sampling
from runtime.sequence import Sequence, SequenceStatus
from tests.runtime.scheduling_case import (
    GROUPS,
    Known,
    Memory,
    decoding,
    expected,
    make,
    pooling_sequence,
    sequence,
)


def test_prompts_take_smaller_pieces_while_others_decode():
    scheduler = make(budget=16, mixed=5)
    scheduler.add(sequence(0, range(10, 14), max_tokens=8))
    first = scheduler.schedule()
    assert [row.num_tokens for row in first.rows] == [4]
    scheduler.settle(first, [[1]])
    for number in (1, 2):
        scheduler.add(sequence(number, range(20 * number, 20 * number + 9)))
    pieces = []
    for _ in range(4):
        batch = scheduler.schedule()
        pieces.append([row.num_tokens for row in batch.rows])
        scheduler.settle(batch, [[1]] * len(batch.sampling_rows))
    assert pieces[:3] == [[1, 5], [1, 4, 1], [1, 1, 5]]


@pytest.mark.parametrize(
    ("num", "stages", "parts"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (2, 3, [1, 1])]
)
def test_decodes_share_the_steps_under_way_in_each_stage_and_take_turns(num, stages, parts):
    scheduler = make(seqs=8, stages=stages)
    memory = Memory(scheduler)
    decoding(scheduler, memory, num)
    seen: list[set[int]] = []
    in_flight = deque()
    for _ in range(3 * len(parts)):
        batch = scheduler.schedule()
        seen.append({row.number for row in batch.rows})
        in_flight.append((batch, *memory.run(batch)))
        if len(in_flight) > stages:
            scheduler.settle(*in_flight.popleft())
    assert [len(numbers) for numbers in seen[: len(parts)]] == parts
    for first in range(len(seen) - len(parts) + 1):
        together = seen[first : first + len(parts)]
        assert sum(map(len, together)) == num, "each has a turn in as many steps as there are parts"
        assert set().union(*together) == set(range(num))


def test_a_state_that_is_read_again_waits_for_its_turn_in_the_stages_without_a_row():
    scheduler = make(stages=2, groups=GROUPS["states"], proposer=Known([50, 51]))
    memory = Memory(scheduler)
    first, second = decoding(scheduler, memory, 2)
    num_tokens = []
    for _ in range(3):
        batch = scheduler.schedule()
        num_tokens.append({row.number: row.num_tokens for row in batch.rows})
        scheduler.settle(batch, *memory.run(batch))
    assert num_tokens == [{first.number: 3}, {second.number: 1}, {first.number: 2}]
    assert first.token_ids == expected(first)[: first.num_tokens]


def test_one_that_decodes_alone_is_a_step_ahead_and_no_more_whatever_the_stages():
    scheduler = make(stages=4)
    memory = Memory(scheduler)
    decoding(scheduler, memory, 1)
    first, second = scheduler.schedule(), scheduler.schedule()
    done = [memory.run(first), memory.run(second)]
    assert scheduler.schedule() is None
    scheduler.settle(first, *done[0])
    assert len(scheduler.schedule().rows) == 1


def test_without_decodes_a_prompt_has_the_whole_budget():
    scheduler = make(budget=16, mixed=5)
    scheduler.add(sequence(0, range(10, 30)))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [16]


@pytest.mark.parametrize(("decodes", "limit", "total"), [(1, 5, 6), (32, 512, 512), (128, 512, 640), (100, 512, 576)])
def test_prompts_beside_decodes_fill_tiles(decodes, limit, total):
    scheduler = make(num_blocks=4000, seqs=200, budget=2000, mixed=limit)
    for number in range(decodes):
        scheduler.add(sequence(number, [number + 10], max_tokens=8))
    scheduler.settle(scheduler.schedule(), [[1]] * decodes)
    scheduler.add(sequence(decodes, range(1000, 3000)))
    assert scheduler.schedule().num_tokens == total


def beside_a_stream(others: list[Sequence], mixed=8, budget=64) -> list[int]:
    """Work beside a stream's token, in tokens, of each step until `others` have been computed; one that is scored is three."""
    scheduler = make(num_blocks=4000, seqs=40, budget=budget, mixed=mixed)
    stream = sequence(0, [10], max_tokens=1000, limit=2000)
    scheduler.add(stream)
    scheduler.settle(scheduler.schedule(), [[11]])
    for other in others:
        scheduler.add(other)
    work = []
    while any(other.status is not SequenceStatus.FINISHED for other in others):
        batch = scheduler.schedule()
        assert 0 in {row.number for row in batch.rows}, "the stream missed a step"
        decodes = [row for row in batch.rows if row.num_tokens == 1 and row.binding is None]
        scored = sum(row.num_tokens for row in batch.prompt_logprobs_rows)
        work.append(batch.num_tokens - len(decodes) + 2 * scored)
        scheduler.settle(batch, [[12]] * len(batch.sampling_rows), [[0.0]] * len(batch.pooling_rows))
    return work


PROMPT = list(range(20, 50))
BODIES = {
    "many prompts": [sequence(n, [*PROMPT, n], max_tokens=3) for n in range(1, 80)],
    "a long prompt": [sequence(1, range(10, 500), max_tokens=1, limit=600)],
    "a scored prompt": [sequence(1, range(10, 200), max_tokens=1, limit=600, prompt_logprobs=20)],
    "scored prompts": [sequence(n, [n, *PROMPT], max_tokens=0, prompt_logprobs=1) for n in range(1, 20)],
    "n": [sequence(n, PROMPT, max_tokens=3) for n in range(1, 129)],
    "beams": [sequence(n, [*PROMPT, 60 + n % 5, n], max_tokens=1, logprobs=9) for n in range(1, 129)],
    "vectors": [pooling_sequence(n, [n, *PROMPT]) for n in range(1, 40)],
}


@pytest.mark.parametrize("others", BODIES.values(), ids=BODIES)
def test_a_step_beside_a_stream_holds_so_much_of_others_and_no_more(others):
    work = beside_a_stream(others)
    assert max(work) <= 8
    assert sum(work) / len(work) > 4  # and is well used


@pytest.mark.parametrize("mixed", [1, 2, 3])
def test_a_scored_prompt_moves_on_however_little_may_run_beside_a_stream(mixed):
    assert len(beside_a_stream([sequence(1, PROMPT, max_tokens=0, prompt_logprobs=0)], mixed)) <= 31


def test_who_waits_for_a_mask_is_a_stream_too():
    scheduler = make(budget=16, mixed=5)
    scheduler.add(sequence(0, range(10, 14), max_tokens=8))
    _, sampling = scheduler.schedule().split({0})
    deferred_sampling.defer(scheduler, sampling)
    deferred_sampling.resume(scheduler, sampling)
    scheduler.settle(sampling, [[1]])
    _, sampling = scheduler.schedule().split({0})
    deferred_sampling.defer(scheduler, sampling)
    scheduler.add(sequence(1, range(20, 40)))
    assert [(row.number, row.num_tokens) for row in scheduler.schedule().rows] == [(1, 5)]


def test_prompts_that_only_end_are_nobody_s_stream():
    scheduler = make(budget=16, mixed=5)
    scheduler.add(sequence(0, range(10, 14), max_tokens=1))
    scheduler.schedule()  # its only token is on the device
    scheduler.add(sequence(1, range(20, 40)))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [16]
