"""Drafts that the device makes: how many are asked for, as costs and acceptance become known."""

from __future__ import annotations

from runtime.api import Request, SamplingParams
from runtime.batch import ON_DEVICE, SAMPLE, Sample, ScheduledBatch, ScheduledRow
from runtime.sequence import Sequence
from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.methods import speculation_of
from runtime.speculate.resting import PROBE_EVERY, Resting
from runtime.speculate.speculation import PLAIN_EVERY, DeviceSpeculation

MOST = 3


def speculation(draft_share: float = 0.01, **more) -> DeviceSpeculation:
    given = {"method": "ngram_gpu", "num_speculative_tokens": MOST} | more
    found = speculation_of(SpeculativeConfig.of(given), draft_share)
    assert isinstance(found, DeviceSpeculation)
    return found


def sequence(number: int) -> Sequence:
    return Sequence(Request(str(number), [1], SamplingParams(99)), number=number, max_model_len=200, seed=0)


def step(rows: int, num_drafts: int, num_proposed: int) -> ScheduledBatch:
    work = Sample(num_drafts) if num_drafts else SAMPLE
    drafts = (ON_DEVICE,) * num_drafts
    return ScheduledBatch(
        tuple(
            ScheduledRow(row, row, 9, 1 + num_drafts, (), drafts, work=work, num_proposed=num_proposed)
            for row in range(rows)
        ),
        rows * (1 + num_drafts),
        0,
    )


def run(told: DeviceSpeculation, num_steps: int, *, num_right: int, draft_s: float) -> list[int]:
    """How many drafts each step of one row asks for, where a step takes a second and `draft_s` more for each draft."""
    one, proposed, asked, resting = sequence(1), 0, [], Resting(told)
    for _ in range(num_steps):
        one.num_proposed = proposed
        drafts = len(told.guesses([(one, 9)], 1).get(1, ()))
        assert drafts == proposed
        probes = resting.probes(1)
        proposed = told.to_propose([(one, 9)], 1, probes=probes).get(1, 0)
        resting.note(1, pays=told.paid and not probes)
        asked.append(proposed)
        told.settled(one, drafts, [5] * (1 + min(drafts, num_right)))
        told.record_step(step(1, drafts, proposed), 1 + draft_s * drafts)
    return asked


def test_without_a_price_there_are_as_many_as_there_may_be():
    told = speculation(adaptive=False)
    assert told.to_propose([(sequence(1), 9), (sequence(2), 2)], 5) == {1: MOST, 2: 2}


def test_what_is_right_and_cheap_is_asked_for_once_a_plain_step_is_known():
    asked = run(speculation(), 2 * PLAIN_EVERY, num_right=MOST, draft_s=0.01)
    assert asked[0] == 0
    assert asked[20:PLAIN_EVERY].count(MOST) > PLAIN_EVERY - 24
    pauses = [at for at in range(20, len(asked)) if not asked[at]]
    assert len(pauses) >= 2
    assert pauses[1] == pauses[0] + 1  # the second of them neither checks nor makes any, and tells what that takes


def test_what_is_wrong_or_dear_is_asked_for_no_more_but_tried_again_now_and_then():
    for num_right, draft_s in ((0, 0.05), (1, 2.0)):
        asked = run(speculation(0.1), 3 * PROBE_EVERY, num_right=num_right, draft_s=draft_s)
        assert sum(num > 0 for num in asked[100:]) < 40
        assert any(asked[PROBE_EVERY:])


def test_a_step_that_only_makes_or_only_checks_drafts_tells_nothing():
    told = speculation()
    told.record_step(step(1, 0, 0), 1.0)
    before = told._cost.of(1)
    told.record_step(step(1, 0, MOST), 9.0)
    told.record_step(step(1, MOST, 0), 9.0)
    assert told._cost.of(1) == before
    told.record_step(step(1, MOST, MOST), 9.0)
    assert told._cost.of(1) != before
