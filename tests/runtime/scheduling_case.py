"""A scheduler alone, without torch or an engine. A model here is a function of a row's tokens, if its blocks hold what it reads."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.api import Request, SamplingParams
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.constrain import deferred as deferred_sampling
from runtime.feature import Feature
from runtime.kv.block_pool import BlockPool
from runtime.kv.kinds import AttentionKVSpec, Chunk, Full, Nothing, RecurrentStateSpec, State, Window
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import PLAIN, PrefixCache
from runtime.parallel.stage_turns import StageTurns
from runtime.policy.fairness import POLICIES
from runtime.policy.step_budget import EngineLoad, FixedBudget
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from runtime.snapshots.scheduling import SnapshotScheduling
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation
from tests.invariants import check_pool, check_tables
from tests.pooling import POOLING

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
    entry_blocks=1,
) -> Scheduler:
    limits = SchedulerLimits(seqs, budget, frozenset({EOS}))
    caching = caching and all(group.kind.no_prefix_reason is None for group in groups)
    features: list[Feature] = [StageTurns(stages)] if stages > 1 else []
    if caching and any(group.state for group in groups):
        features.append(SnapshotScheduling())
    if proposer is not None:
        features.append(DraftScheduling(Speculation(proposer, 64)))
    return Scheduler(
        limits, BlockPool(num_blocks), PrefixCache(BLOCK, caching, groups, entry_blocks=entry_blocks), POLICIES[policy](),
        step_budget=step_budget or FixedBudget(mixed), features=features,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SomeDecode(FixedBudget):
    """A step has room for so many decodes, as far as it may choose."""

    room: Callable[[], int] = lambda: 1
    for_narrowest: Callable[[], bool] = lambda: False
    has_turns: bool = True
    ending_cost: int = 2

    def num_decodes(self, most: EngineLoad) -> int:
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


def state_blocks(scheduler: Scheduler) -> set[int]:
    """Blocks that running sequences write again with each step."""
    tables = (table for sequence in scheduler.running for table in sequence.tables if table.group.state)
    return {block_id for table in tables for block_id in table.ids}


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


def cached(scheduler: Scheduler, memory: Memory, *prompts) -> list[int]:
    """Prompts computed one after the other; how much of each was found."""
    found = []
    for number, prompt in enumerate(prompts):
        seq = sequence(number, prompt, max_tokens=1)
        scheduler.add(seq)
        run_to_end(scheduler, memory)
        found.append(seq.num_cached_tokens)
    return found


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


def batch_of(row: ScheduledRow) -> ScheduledBatch:
    return ScheduledBatch((row,), row.num_tokens, 0)


def decoding(scheduler: Scheduler, memory: Memory, num: int) -> list[Sequence]:
    """So many sequences, whose prompts have been computed and settled."""
    sequences = [sequence(number, [10 + number], 20) for number in range(num)]
    for each in sequences:
        scheduler.add(each)
    batch = scheduler.schedule()
    scheduler.settle(batch, *memory.run(batch))
    return sequences
