"""Drafts are checked where that pays: simulated devices, whose steps take what a formula says; no clock and no luck of the machine.

What is measured is tokens in a time, beside the same traffic without drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import ON_DEVICE, Sample, ScheduledBatch, ScheduledRow
from runtime.policy.step_budget import FixedBudget
from runtime.sequence import Forced, Sequence
from runtime.speculate.ngram import Ngram
from runtime.speculate.speculation import DeviceSpeculation, Speculation, forced_ids
from runtime.speculate.verification_cost import VerificationCost
from tests.benches.simulate import DEVICES, Arrival, Device, Traffic, closed, simulate
from tests.runtime.speculate.texts import sequence
from tests.tiers import on_push

RIGHT, WRONG = 1, 2  # tokens
GPU = replace(DEVICES["8b"], launch=0.3, drafts=0.2)
CPU = replace(DEVICES["smollm2-cpu"], launch=0.2, row=0.5)


class Always:
    """A proposer with as many guesses as are wanted."""

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        self.num_calls += 1
        return [RIGHT] * most

    def finished(self, sequence: Sequence) -> None:
        pass


class Truth:
    """Each guessed token is right with a chance, which may change after so many tokens of all."""

    def __init__(self, chance: float, later: float | None = None, change_at: int = 0) -> None:
        self._rng = random.Random(3)
        self._chance = chance
        self._later = later
        self._change_at = change_at
        self.num_tokens = 0

    def __call__(self, row: ScheduledRow) -> list[int]:
        assert isinstance(row.work, Sample)
        chance = self._chance if self._later is None or self.num_tokens < self._change_at else self._later
        ids = []
        for guess in (*row.draft_ids, None):
            ids.append(RIGHT if self._rng.random() < chance else WRONG)
            if ids[-1] != (RIGHT if guess == ON_DEVICE else guess):
                break
        self.num_tokens += len(ids)
        return ids


def share(device: Device) -> float:
    cost = device.assumed()
    return cost.token_s / cost.base_s


def faster(device: Device, streams: int, chance: float, most: int, *, length=256, **truth) -> tuple[float, Speculation]:
    """How many times the tokens per second, and what decided it."""
    traffic = closed(streams, 2 * streams, 64, length)
    plain = simulate(device, FixedBudget(None), traffic)
    speculation = Speculation(Always(), most, VerificationCost(share(device)))
    guessed = simulate(device, FixedBudget(None), traffic, speculation=speculation, gained=Truth(chance, **truth))
    assert sum(len(answer.times_s) for answer in guessed.answers) == 2 * streams * length
    return guessed.tokens_per_s / plain.tokens_per_s, speculation


@pytest.mark.parametrize(
    ("device", "streams", "chance", "least"),
    [(GPU, 1, 0.7, 1.9), (GPU, 32, 0.7, 1.55), (GPU, 1, 0.95, 3.5), (CPU, 1, 0.7, 1.5), (CPU, 1, 0.95, 2.4)],
)
def test_drafts_that_are_often_right_bring_what_they_can(device, streams, chance, least):
    gain, speculation = faster(device, streams, chance, 3 if chance == 0.7 else 8)
    assert gain > least
    assert speculation.num_accepted_tokens / speculation.num_draft_tokens > 0.4


@pytest.mark.parametrize("chance", on_push([0.0, 0.3, 0.6, 0.9], 0.0, 0.6))
@pytest.mark.parametrize(
    ("device", "streams"),
    [(GPU, 256), (GPU, 1), (CPU, 16), (CPU, 1), (replace(GPU, token=0.2), 64), (replace(CPU, token=15), 1)],
)
def test_drafts_never_cost_more_than_they_bring(device, streams, chance):
    gain, _ = faster(device, streams, chance, 3, length=256 if streams < 64 else 96)
    assert gain > 0.98


@given(
    base=st.floats(0.5, 20), token=st.floats(0.001, 3), drafts=st.floats(0, 5), launch=st.floats(0, 2),
    streams=st.sampled_from([1, 2, 5, 16]), chance=st.floats(0, 1), most=st.integers(1, 16),
)  # fmt: skip
@settings(max_examples=25)
def test_on_any_device_at_any_load_they_cost_next_to_nothing(base, token, drafts, launch, streams, chance, most):
    device = Device(base, token, 1e-4, 1e-6, drafts=drafts, launch=min(launch, base / 4))
    gain, _ = faster(device, streams, chance, most)
    assert gain > 0.93  # what it takes to learn, in 512 tokens a stream


@pytest.mark.parametrize("num_chats", [0, 8])
@pytest.mark.parametrize("assumed_share", [0.1, 1.0, 3.0])
def test_a_lone_stream_that_repeats_itself_is_drafted_for_soon_whatever_a_draft_was_assumed_to_cost(
    assumed_share, num_chats
):
    """A period of 20 tokens, after chats in which n-grams are seldom right."""
    rng, answers, drafted_at = random.Random(1), {}, []

    def gained(row: ScheduledRow) -> list[int]:
        answer, ids = answers.setdefault(row.number, []), []
        for guess in (*row.draft_ids, None):
            place = len(answer) + len(ids)
            ids.append(100 + place % 20 if row.number == num_chats else 1000 + rng.randrange(10))
            if ids[-1] != guess:
                break
        if row.number == num_chats and row.draft_ids:
            drafted_at.append(len(answer))
        answer += ids
        return ids

    speculation = Speculation(Ngram(2, 5), 8, VerificationCost(assumed_share))
    simulate(CPU, FixedBudget(None), closed(1, num_chats + 1, 64, 120), speculation=speculation, gained=gained)
    assert drafted_at[0] < 40


def test_a_sequence_whose_guesses_turn_bad_drafts_less_and_more_again_when_they_turn_good():
    good, most_of = faster(CPU, 1, 0.95, 8, later=0.05, change_at=256)
    bad, little = faster(CPU, 1, 0.05, 8, later=0.95, change_at=256)
    alone, none = faster(CPU, 1, 0.05, 8)
    assert min(good, bad) > 1.2
    assert alone > 0.97
    assert none.num_draft_tokens < min(most_of.num_draft_tokens, little.num_draft_tokens) / 2


def test_one_bad_guesser_among_good_ones_is_left_out():
    speculation = Speculation(Always(), 4, VerificationCost(share(CPU)))
    number_of_bad, drafted = 0, {0: 0, 1: 0}
    truths = {0: Truth(0.02), 1: Truth(0.95)}

    def gained(row: ScheduledRow) -> list[int]:
        drafted[row.number != number_of_bad] += len(row.draft_ids)
        return truths[row.number != number_of_bad](row)

    simulate(CPU, FixedBudget(None), closed(4, 4, 64, 400), speculation=speculation, gained=gained)
    assert drafted[0] < drafted[1] / 3 / 4  # of three good ones


def test_where_nothing_pays_the_proposer_is_seldom_asked():
    device = replace(GPU, token=0.5)
    _, speculation = faster(device, 32, 0.3, 3)
    num_tokens = 2 * 32 * 256
    assert speculation._proposer.num_calls < num_tokens / 4
    assert speculation.num_draft_tokens < num_tokens / 50


def test_where_chance_says_what_is_right_only_what_steps_check_is_learned_of():
    """What no step checks is wrong there, whatever the chance: drafts would never be worth while again."""

    class Chance(Truth):
        def __call__(self, row: ScheduledRow) -> list[int]:
            return super().__call__(row) if row.draft_ids else [WRONG]

    found = {}
    for compares in (True, False):
        speculation = Speculation(Always(), 3, VerificationCost(share(GPU)), compares=compares)
        simulate(GPU, FixedBudget(None), closed(64, 128, 64, 96), speculation=speculation, gained=Chance(0.7))
        found[compares] = speculation
    assert found[False]._chances.average == pytest.approx(0.7, abs=0.1)
    assert found[False].num_draft_tokens > 2 * found[True].num_draft_tokens


@pytest.mark.parametrize("on_device", [False, True])
def test_no_step_with_drafts_is_longer_than_what_is_captured(on_device):
    """Beyond, it would be launched kernel by kernel: drafts might never pay, and to try them would cost most."""
    cost, batches = VerificationCost(share(GPU)), []
    if on_device:
        speculation: Speculation = DeviceSpeculation(Ngram(2, 5), 3, cost, longest=96)
    else:
        speculation = Speculation(Always(), 3, cost, longest=96)
    record_step = speculation.record_step
    speculation.record_step = lambda batch, step_s: (batches.append(batch), record_step(batch, step_s))
    simulate(GPU, FixedBudget(None), closed(64, 64, 64, 200), speculation=speculation, gained=Truth(0.9))
    drafted = [batch for batch in batches if any(row.draft_ids for row in batch.rows)]
    assert max(batch.num_tokens for batch in drafted) == 96
    assert speculation.num_accepted_tokens > 0


def test_without_adapting_all_guesses_are_checked():
    speculation = Speculation(Always(), 3)
    simulate(CPU, FixedBudget(None), closed(1, 1, 64, 100), speculation=speculation, gained=Truth(0.0))
    assert speculation.num_draft_tokens > 3 * 95
    assert speculation.num_accepted_tokens == 0


@pytest.mark.parametrize(
    ("num_known", "num_in_flight", "most", "ids"),
    [(3, 0, 9, ()), (4, 0, 9, (50, 51, 52)), (4, 1, 9, (51, 52)), (5, 1, 1, (52,)), (4, 0, 2, (50, 51)), (6, 1, 9, ())],
)
def test_forced_ids_stand_behind_what_is_known_or_in_flight(num_known, num_in_flight, most, ids):
    one = sequence([1, 2], [7] * num_known)
    one.num_in_flight, one.forced = num_in_flight, Forced(4, (50, 51, 52))
    assert forced_ids(one, most) == ids


HEAD = {"follow": 0.05, "guess": 0.2}  # of a step of 8B's, and ms of a round


def by_head(
    device: Device, streams: int, chance: float, *, length: int, total: int | None = None
) -> tuple[float, DeviceSpeculation, list[ScheduledBatch]]:
    """As `faster`, with drafts of a head that follows steps; and the steps."""
    traffic = closed(streams, total or 2 * streams, 64, length)
    plain = simulate(device, FixedBudget(None), traffic)
    with_head = replace(device, follow=device.base * HEAD["follow"] * (1 + streams // 128), guess=HEAD["guess"])
    cost = VerificationCost(share(device), HEAD["follow"])
    speculation = DeviceSpeculation(Ngram(2, 5), 3, cost, rests=True)
    batches: list[ScheduledBatch] = []
    record_step, truth = speculation.record_step, Truth(chance)

    def noted(batch: ScheduledBatch, step_s: float) -> None:
        batches.append(batch)
        record_step(batch, step_s)

    speculation.record_step = noted
    guessed = simulate(with_head, FixedBudget(None), traffic, speculation=speculation, gained=truth)
    return guessed.tokens_per_s / plain.tokens_per_s, speculation, batches


def test_a_head_that_guesses_for_nothing_follows_few_steps():
    gain, _, batches = by_head(GPU, 256, 0.7, length=400, total=256)
    assert gain > 0.98
    assert sum(batch.follows for batch in batches) < 0.2 * len(batches)
    assert not any(row.num_proposed for batch in batches for row in batch.rows if not batch.follows)


@pytest.mark.parametrize(("streams", "least"), [(1, 1.7), (8, 1.6)])
def test_a_head_that_is_often_right_follows_all(streams, least):
    gain, _, batches = by_head(GPU, streams, 0.7, length=400)
    assert gain > least
    assert all(batch.follows for batch in batches)


def test_those_who_are_left_when_others_have_gone_are_computed_anew_and_have_drafts():
    """256 streams for a while, of which four go on."""
    device, lengths = GPU, {number: 1500 if number < 4 else 150 for number in range(256)}
    speculation = DeviceSpeculation(Ngram(2, 5), 3, VerificationCost(share(device), HEAD["follow"]), rests=True)
    traffic = Traffic([Arrival(number * 2e-5, 64, length) for number, length in lengths.items()])
    plain = simulate(device, FixedBudget(None), traffic)
    guessed = simulate(
        replace(device, follow=0.2, guess=0.2), FixedBudget(None), traffic, speculation=speculation, gained=Truth(0.7)
    )
    assert plain.total_s / guessed.total_s > 1.3
    assert [len(answer.times_s) for answer in guessed.answers].count(1500) == 4


def test_a_step_that_was_shorter_than_the_clock_can_tell_is_no_measure_of_others():
    cost = VerificationCost(0.1)
    cost.learn(1, 0, 0.0)
    assert cost.of(1) is None
    cost.learn(1, 0, 0.01)
    cost.learn(1, 2, 0.015)
    assert cost.of(1) is not None
