"""Tokens that what makes drafts has not computed: whose they are has no drafts, nor who finds them in the prefix cache, until they
are computed anew."""

from __future__ import annotations

import pytest

from runtime.api import Request, SamplingParams
from runtime.batch import ScheduledBatch
from runtime.kv.block_pool import BlockPool
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from runtime.speculate.ngram import Ngram
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import DeviceSpeculation
from tests.kinds import full, window

BLOCK = 4


class Told(DeviceSpeculation):
    """Drafts for all who may have some; follows, and finds them worth while, as it is told."""

    follow = True
    worth = 0.0

    def __init__(self) -> None:
        super().__init__(Ngram(2, 5), 3)

    def gain(self, num_rows: int) -> float:
        return self.worth

    def steps_to_compute(self, num_tokens: int) -> float:
        return num_tokens / 4


def make(groups=None) -> tuple[Scheduler, Told]:
    told = Told()
    feature = DraftScheduling(told)
    cache = PrefixCache(BLOCK) if groups is None else PrefixCache(BLOCK, groups=groups)
    limits = SchedulerLimits(4, 64, frozenset())
    scheduler = Scheduler(limits, BlockPool(80), cache, POLICIES["fcfs"](), features=[feature])
    feature.resting.follows_size = lambda num_rows: told.follow
    return scheduler, told


def sequence(number: int, prompt: list[int], max_tokens: int = 50, *, speculative: bool = True) -> Sequence:
    request = Request(str(number), prompt, SamplingParams(max_tokens, 0.0, ignore_eos=True), speculative=speculative)
    return Sequence(request, number=number, max_model_len=200, seed=0)


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.settle(batch, [[9] for _ in batch.sampling_rows])
    return batch


def proposed(batch: ScheduledBatch) -> dict[int, int]:
    return {row.number: row.num_proposed for row in batch.rows}


PROMPT = [*range(30, 42)]


def test_whoever_lacks_a_token_has_no_drafts_and_others_have():
    scheduler, told = make()
    scheduler.add(one := sequence(1, PROMPT))
    assert step(scheduler).follows
    assert proposed(step(scheduler)) == {1: 3}
    told.follow = False
    resting = step(scheduler)
    assert not resting.follows
    assert proposed(resting) == {1: 0}
    told.follow = True
    assert one.first_unfollowed == len(PROMPT) + 1  # all had settled
    scheduler.add(sequence(2, [7, 8]))
    assert step(scheduler).follows
    last = step(scheduler)
    assert last.follows
    assert proposed(last) == {1: 0, 2: 3}


def test_where_drafts_are_in_flight_what_replaces_wrong_ones_is_lacking_too():
    """The next step is scheduled as if all drafts were right."""
    scheduler, told = make()
    scheduler.add(one := sequence(1, PROMPT))
    for _ in range(2):
        step(scheduler)
    checks = scheduler.schedule()
    assert one.num_in_flight == 4
    first_replaced = one.num_known_tokens  # what the next step computes first, if all drafts are wrong
    told.follow = False
    resting = scheduler.schedule()
    assert not resting.follows
    assert one.first_unfollowed <= first_replaced < resting.rows[0].start
    scheduler.settle(checks, [[9]])
    assert one.num_known_tokens == first_replaced + 1


def test_a_step_in_which_all_lack_some_is_not_followed():
    scheduler, told = make()
    told.follow = False
    scheduler.add(sequence(1, PROMPT))
    step(scheduler)
    told.follow = True
    assert not step(scheduler).follows


def test_nothing_is_followed_for_those_who_have_no_drafts_and_they_lack_it():
    scheduler, _ = make()
    scheduler.add(sequence(1, PROMPT, max_tokens=6, speculative=False))
    while scheduler.running or scheduler.waiting:
        assert not step(scheduler).follows
    scheduler.add(two := sequence(2, [*PROMPT, 3]))
    step(scheduler)
    assert (two.num_cached_tokens, two.first_unfollowed) == (len(PROMPT), 0)


def test_beside_others_those_who_have_no_drafts_lack_nothing():
    scheduler, _ = make()
    scheduler.add(sequence(1, PROMPT, max_tokens=6, speculative=False))
    scheduler.add(sequence(2, [8, 9]))
    for _ in range(8):
        assert step(scheduler).follows
    scheduler.add(three := sequence(3, [*PROMPT, 3]))
    step(scheduler)
    assert (three.num_cached_tokens, three.first_unfollowed) == (len(PROMPT), -1)


@pytest.mark.parametrize("groups", [None, (LayerGroup(full(1, 8), 2), LayerGroup(window(1, 8, 6)))])
def test_who_finds_such_tokens_in_the_prefix_cache_lacks_them_too(groups):
    scheduler, told = make(groups)
    scheduler.add(one := sequence(1, PROMPT[:8], max_tokens=9))
    step(scheduler)
    told.follow = False
    while scheduler.running:
        step(scheduler)
    told.follow = True
    text = one.token_ids
    scheduler.add(two := sequence(2, [*text[:8], 3, 4]))
    step(scheduler)
    assert two.num_cached_tokens == 8
    assert two.first_unfollowed == -1
    scheduler.add(three := sequence(3, [*text[:16], 3, 4]))
    step(scheduler)
    assert three.num_cached_tokens == 16
    assert three.first_unfollowed == 8
    assert proposed(step(scheduler)) == {2: 3, 3: 0}


def test_where_drafts_pay_a_cached_prefix_that_lacks_some_is_computed_once():
    scheduler, told = make()
    told.follow = False
    scheduler.add(sequence(1, PROMPT, max_tokens=2))
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    told.follow, told.worth = True, 1.0
    for number, cached in ((2, 0), (3, 12)):
        scheduler.add(again := sequence(number, [*PROMPT, 3], max_tokens=9))
        step(scheduler)
        assert again.num_cached_tokens == cached
        assert again.first_unfollowed == -1
        assert proposed(step(scheduler))[number] == 3
    scheduler.add(other := sequence(4, [*PROMPT, 3], speculative=False))
    step(scheduler)
    assert other.num_cached_tokens == 12


def test_one_who_lacks_some_is_computed_anew_when_that_is_worth_while_and_tells_the_same():
    scheduler, told = make()
    scheduler.add(one := sequence(1, PROMPT, max_tokens=40))
    step(scheduler)
    told.follow = False
    for _ in range(5):
        step(scheduler)
    told.follow, told.worth = True, 1.0
    batches = []
    while one.first_unfollowed >= 0:
        batches.append(step(scheduler))
    anew = batches[-1]
    assert anew.follows
    assert len(batches) - 1 <= 3  # steps without drafts that were waited for: what it takes
    assert anew.rows[0].binding is not None
    assert anew.rows[0].start == len(PROMPT)  # what was followed is found in the cache
    assert (scheduler.features[0].num_computed_anew, scheduler.sequences.num_preemptions, one.num_preemptions) == (
        1,
        0,
        0,
    )
    while scheduler.running:
        step(scheduler)
    assert one.output_ids == [9] * 40
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks


def test_nobody_is_computed_anew_for_little_or_while_others_wait():
    scheduler, told = make()
    told.follow = False
    for number in range(4):
        scheduler.add(sequence(number, [number, *PROMPT], max_tokens=12))
    step(scheduler)
    told.follow, told.worth = True, 0.1  # of a step, for each of twelve tokens
    for _ in range(6):
        step(scheduler)
    assert not scheduler.features[0].num_computed_anew
    told.worth = 100.0
    scheduler.add(sequence(9, [9]))  # all rows are taken
    step(scheduler)
    assert not scheduler.features[0].num_computed_anew


def test_blocks_that_are_handed_out_anew_lack_nothing():
    scheduler, told = make()
    told.follow = False
    for number in range(30):  # more than there are blocks
        scheduler.add(sequence(number, [number + token for token in PROMPT], max_tokens=2))
        while scheduler.running or scheduler.waiting:
            step(scheduler)
    assert len(scheduler.features[0].resting._blocks) > 40
    told.follow = True
    for number in range(30, 60):
        scheduler.add(sequence(number, [100 + number + token for token in PROMPT], max_tokens=2))
        while scheduler.running or scheduler.waiting:
            step(scheduler)
    assert not scheduler.features[0].resting._blocks
