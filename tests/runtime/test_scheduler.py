"""The scheduler alone: no torch, no engine. A model here is a function of a row's tokens, if its blocks hold what it reads."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import FinishReason, Request, SamplingParams
from runtime.batch import NOT_FINITE, SAMPLE_MASKED, BlockCopy, Pool, Sample, ScheduledBatch, ScheduledRow
from runtime.constrain import deferred as deferred_sampling
from runtime.feature import Feature
from runtime.kv.block_pool import BlockPool
from runtime.kv.kinds import AttentionKVSpec, Chunk, Full, Nothing, RecurrentStateSpec, State, Window
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import PLAIN, PrefixCache
from runtime.parallel.stage_turns import StageTurns
from runtime.policy.fairness import POLICIES
from runtime.policy.step_budget import FixedBudget, Load
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence, Status
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation
from tests.invariants import check_pool, check_tables
from tests.pooling import LAST, OF_ALL, POOLING

BLOCK = 4
EOS = 7


KV = AttentionKVSpec(1, 1)
FULL, STATE = Full(KV), State(RecurrentStateSpec(((1,),)))
GROUPS = {
    "plain": PLAIN,
    "windows": (LayerGroup(Window(KV, 9)),),
    "hybrid": (LayerGroup(FULL), LayerGroup(Window(KV, 6), 3)),
    "three reaches": (LayerGroup(FULL, 2), LayerGroup(Window(KV, 1)), LayerGroup(Window(KV, 12))),
    "chunks": (LayerGroup(FULL, 3), LayerGroup(Chunk(KV, 8))),
    "states": (LayerGroup(STATE),),
    "states beside keys": (LayerGroup(FULL), LayerGroup(STATE, 3)),
    "nothing": (LayerGroup(Nothing()),),
    "nothing beside keys": (LayerGroup(FULL), LayerGroup(Nothing())),
}


def make(
    num_blocks=32,
    seqs=4,
    budget=16,
    policy="fcfs",
    caching=True,
    mixed=None,
    groups=PLAIN,
    proposer=None,
    step_budget=None,
    stages=1,
) -> Scheduler:
    limits = SchedulerLimits(seqs, budget, frozenset({EOS}))
    caching = caching and all(group.kind.no_prefix_reason is None for group in groups)
    features: list[Feature] = [StageTurns(stages)] if stages > 1 else []
    if proposer is not None:
        features.append(DraftScheduling(Speculation(proposer, 64)))
    return Scheduler(
        limits, BlockPool(num_blocks), PrefixCache(BLOCK, caching, groups), POLICIES[policy](),
        step_budget=step_budget or FixedBudget(mixed), features=features,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SomeDecode(FixedBudget):
    """A step has room for so many decodes, as far as it may choose."""

    room: Callable[[], int] = lambda: 1
    for_narrowest: Callable[[], bool] = lambda: False
    has_turns: bool = True
    ending_cost: int = 2

    def num_decodes(self, most: Load) -> int:
        return self.room()

    def is_for_narrowest(self) -> bool:
        return self.for_narrowest()


def sequence(
    number: int, prompt, max_tokens=4, priority=0, salt=None, limit=64, caller=None, group=None, **params
) -> Sequence:
    request = Request(str(number), list(prompt), SamplingParams(max_tokens, **params), priority, salt, caller=caller)
    return Sequence(request, number=number, max_model_len=limit, seed=0, group=group)


def pooling_sequence(number: int, prompt, priority=0, salt=None, params=POOLING) -> Sequence:
    request = Request(str(number), list(prompt), params, priority, salt)
    return Sequence(request, number=number, max_model_len=64, seed=0)


def idle_blocks(scheduler: Scheduler) -> list[int]:
    pool = scheduler.blocks.pool
    return [block_id for block_id in range(pool.num_blocks) if not pool.count(block_id)]


@dataclass
class DeviceRow:
    """What the device knows of a row: its tables, its tokens as far as they are sampled, how many of them are computed; and the
    tokens of the step at hand, guesses included."""

    tables: list[dict[int, tuple[int, ...]]]
    text: list[int] = field(default_factory=list)
    num_computed: int = 0
    span: range = range(0)
    span_text: list[int] = field(default_factory=list)

    def content(self, position: int) -> int:
        return hash(tuple(self.span_text[: position + 1]))


class Memory:
    """A device that stores in each slot the hash of all tokens up to there, as keys depend on all of them: a wrong block, a stale
    hit and a block given up too early are seen by whoever reads them. It alone knows how many drafts were right; `skips` says
    which rows gain nothing in a step."""

    def __init__(self, scheduler: Scheduler, skips: Callable[[], bool] = lambda: False) -> None:
        self.groups = scheduler.blocks.cache.groups
        self.skips = skips
        self.blocks = [[None] * BLOCK for _ in range(scheduler.blocks.pool.num_blocks)]
        self.rows = [self.empty() for _ in range(scheduler.limits.max_num_seqs)]

    def empty(self) -> DeviceRow:
        return DeviceRow([{} for _ in self.groups])

    def run(self, batch: ScheduledBatch) -> tuple[list[list[int]], list[list[int]]]:
        """What its sampling rows gained, and its pooling rows' vectors."""
        for copy in batch.copies:
            self.blocks[copy.target] = list(self.blocks[copy.source])
        for row in batch.rows:
            self.store(row)
        for row in batch.rows:  # after every row has stored, as a layer does
            self.read(row)
        vectors = [vector_of(self.rows[row.row].span_text) for row in batch.pooling_rows]
        return self.sample(batch), vectors

    def sample(self, batch: ScheduledBatch) -> list[list[int]]:
        gained = []
        for row in batch.sampling_rows:
            device, ids = self.rows[row.row], []
            for guess in (*row.draft_ids, None) if not self.skips() else ():
                ids.append(next_token(device.text + ids))
                if ids[-1] != guess:
                    break
            device.text += ids
            device.num_computed = len(device.text) - 1
            gained.append(ids)
        return gained

    def give_up_drafts(self, batch: ScheduledBatch) -> None:
        for row in batch.rows:
            self.rows[row.row].num_computed -= len(row.draft_ids)

    def store(self, row: ScheduledRow) -> None:
        if row.binding is not None:
            self.rows[row.row] = self.empty()
            self.rows[row.row].text = [*row.binding.prompt_ids, *row.binding.output_ids]
            self.rows[row.row].num_computed = row.binding.num_computed
            assert row.start == row.binding.num_computed
        device = self.rows[row.row]
        assert row.num_tokens > 0
        if row.restart >= 0:
            assert row.restart == row.start
            device.num_computed = row.restart
        for new in row.new_blocks:
            width = self.groups[new.group].width
            for entry, at in enumerate(range(0, len(new.ids), width), start=new.first_entry):
                device.tables[new.group][entry] = new.ids[at : at + width]
        start = device.num_computed
        device.num_computed += row.num_tokens
        device.span = range(start, start + row.num_tokens)
        device.span_text = device.text[: start + row.num_tokens - len(row.draft_ids)] + list(row.draft_ids)
        assert start <= row.start
        assert len(device.span_text) == device.span.stop
        assert len(row.token_ids) + len(row.draft_ids) in (row.num_tokens, row.num_tokens - 1)
        assert device.text[start : start + len(row.token_ids)] == list(row.token_ids)
        for group, table in zip(self.groups, device.tables, strict=True):
            if group.state:
                self.move_on(device, table[0])
            if not group.kind.grows:
                continue
            for position in device.span:
                for block_id in table[position // BLOCK]:
                    self.blocks[block_id][position % BLOCK] = device.content(position)

    def move_on(self, device: DeviceRow, block_ids: tuple[int, ...]) -> None:
        """A state fills its block; that of a row which begins is not read."""
        start, stop = device.span.start, device.span.stop
        for block_id in block_ids:
            assert start == 0 or self.blocks[block_id] == [device.content(start - 1)] * BLOCK
            self.blocks[block_id] = [device.content(stop - 1)] * BLOCK

    def read(self, row: ScheduledRow) -> None:
        device = self.rows[row.row]
        for group, table in zip(self.groups, device.tables, strict=True):
            if not group.kind.grows:
                continue
            for position in range(group.first_in_window(device.span.start), device.span.stop):
                for block_id in table[position // BLOCK]:
                    assert self.blocks[block_id][position % BLOCK] == device.content(position)


def vector_of(text: list[int]) -> list[int]:
    return [hash(tuple(text)), len(text)]


class Guesses:
    """A proposer that is right now and then, for all of its guess or the beginning."""

    def __init__(self, rng: random.Random, most: int = 4) -> None:
        self.rng = rng
        self.most = most

    def propose(self, sequence, most) -> list[int]:
        guess = []
        for _ in range(self.rng.randrange(self.most + 1)):
            guess.append(next_token(sequence.token_ids + guess) + (self.rng.random() < 0.3))
        return guess[:most]

    def finished(self, sequence) -> None:
        pass


def next_token(context: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(context)) * 31 + 17) % 97 + 10


def expected(seq: Sequence) -> list[int]:
    ids = list(seq.request.prompt_ids)
    while seq.sampling.max_tokens and len(ids) < seq.max_tokens_total:
        ids.append(next_token(ids))
    return ids


def note_prompt_logprobs(scheduler: Scheduler, batch: ScheduledBatch, positions: dict[int, list[int]]) -> None:
    """Which prompt positions `batch` tells of; it computes what it takes to tell."""
    for row in batch.prompt_logprobs_rows:
        span = row.prompt_logprobs
        end = span.start + len(span.token_ids)
        assert row.start < span.start < end <= row.end + 1
        sequence = scheduler.sequences.find(row.number)
        assert sequence is None or list(span.token_ids) == sequence.token_ids[span.start : end]
        positions.setdefault(row.number, []).extend(range(span.start, end))


def run_to_end(scheduler: Scheduler, memory: Memory, depth=2, positions=None, max_steps=10_000) -> int:
    in_flight: deque = deque()
    for step in range(max_steps):
        batch = scheduler.schedule()
        if batch is not None:
            assert batch.num_tokens <= scheduler.limits.max_num_batched_tokens
            in_flight.append((batch, *memory.run(batch)))
        elif not in_flight:
            assert not scheduler.waiting
            assert not scheduler.running
            return step
        check_pool(scheduler)
        check_tables(scheduler, drafting=True)
        if batch is None or len(in_flight) >= depth:
            note_prompt_logprobs(scheduler, in_flight[0][0], {} if positions is None else positions)
            scheduler.settle(*in_flight.popleft())
    raise AssertionError("the scheduler did not finish")


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


def cached(scheduler: Scheduler, memory: Memory, *prompts) -> list[int]:
    """Prompts computed one after the other; how much of each was found."""
    found = []
    for number, prompt in enumerate(prompts):
        seq = sequence(number, prompt, max_tokens=1)
        scheduler.add(seq)
        run_to_end(scheduler, memory)
        found.append(seq.num_cached_tokens)
    return found


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
            assert memory.blocks[copy.target] == copied.pop(copy.target)
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
            if victim.status is not Status.FINISHED:
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
            copied.update({copy.target: list(memory.blocks[copy.target]) for copy in batch.copies})
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
        assert seq.status is Status.FINISHED
    assert scheduler.blocks.pool.num_free == num_blocks
    assert all(scheduler.blocks.pool.count(block_id) == 0 for block_id in range(num_blocks))


def resume(scheduler: Scheduler, memory: Memory, held: list[ScheduledBatch], in_flight: deque, share, rng) -> None:
    """Sample that share of what is deferred."""
    for sampling in held:
        _, now = sampling.split(
            {row.row for row in sampling.rows if deferred_sampling.is_current(scheduler, row) and rng.random() < share}
        )
        deferred_sampling.resume(scheduler, now)
        if now.rows:
            in_flight.append((now, memory.sample(now), []))


def expected_end(seq: Sequence, num: int) -> list[int]:
    """What its last tokens should be."""
    text = seq.token_ids[:-num]
    for _ in range(num):
        text.append(next_token(text))
    return text[-num:]


class Known:
    """A proposer that says what it is told to, and nothing more once that is used up."""

    def __init__(self, *guesses: list[int]) -> None:
        self.guesses = list(guesses)

    def propose(self, sequence, most) -> list[int]:
        return self.guesses.pop(0)[:most] if self.guesses else []

    def finished(self, sequence) -> None:
        pass


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


def batch_of(row: ScheduledRow) -> ScheduledBatch:
    return ScheduledBatch((row,), row.num_tokens, 0)


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
    scheduler = make(proposer=Known([50, 51, 52], [60]), groups=groups)
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
    scheduler = make(1, proposer=Known([50, 51]), groups=GROUPS["states"])
    scheduler.add(sequence(1, range(10, 16), max_tokens=20))
    scheduler.settle(scheduler.schedule(), [[40]])
    assert scheduler.schedule().rows[0].draft_ids == ()


def test_a_state_with_matchers_is_given_no_drafts():
    scheduler = make(proposer=Known([50, 51]), groups=GROUPS["states"])
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
    assert waiting.status is Status.WAITING
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


def decoding(scheduler: Scheduler, memory: Memory, num: int) -> list[Sequence]:
    """So many sequences, whose prompts have been computed and settled."""
    sequences = [sequence(number, [10 + number], 20) for number in range(num)]
    for each in sequences:
        scheduler.add(each)
    batch = scheduler.schedule()
    scheduler.settle(batch, *memory.run(batch))
    return sequences


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
    while any(other.status is not Status.FINISHED for other in others):
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
