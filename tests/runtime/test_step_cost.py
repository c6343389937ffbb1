"""Step cost: learned from steps whose true cost is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.batch import SAMPLE, SAMPLE_MASKED, PromptLogprobsSpan, ScheduledBatch, ScheduledRow
from runtime.step_cost import LearnedCost, StepCost, TimedSteps
from tests.simulate import DEVICES, Device


def step(decodes=0, context=500, prompts=(), start=0, scored=False, masked=False) -> ScheduledBatch:
    work = SAMPLE_MASKED if masked else SAMPLE
    rows = [ScheduledRow(n, n, context, 1, (), work=work) for n in range(decodes)]
    for n, num in enumerate(prompts, start=decodes):
        span = PromptLogprobsSpan(start + 1, (1,) * num, 1) if scored else None
        rows.append(ScheduledRow(n, n, start, num, (1,) * num, work=SAMPLE, prompt_logprobs=span))
    return ScheduledBatch(tuple(rows), sum(row.num_tokens for row in rows), 0)


def show(learned: LearnedCost, device: Device, *batches: ScheduledBatch, times=1) -> None:
    for _ in range(times):
        for batch in batches:
            learned.settled(batch, device.seconds(batch))


@pytest.mark.parametrize("name", ["8b", "smollm2-cpu"])
@pytest.mark.parametrize("wrong", [0.4, 1.0, 2.5])
def test_whatever_was_assumed_steps_tell_what_they_cost(name, wrong):
    device, rng = DEVICES[name], random.Random(4)
    learned = LearnedCost(
        StepCost.assumed(TimedSteps(wrong * device.base / 1000, device.token / wrong / 1000), device.kv_share)
    )
    most = device.budget // 4
    for _ in range(400):
        decodes = rng.randrange(1, device.seqs // 4)
        prompts = [rng.randrange(2, most)] if rng.random() < 0.3 else []
        show(learned, device, step(decodes, rng.randrange(100, 1500), prompts))
    for decodes in (8, device.seqs // 4):
        batch = step(decodes, 600)
        assert learned.decode_s(decodes, 600 * decodes) == pytest.approx(device.seconds(batch), rel=0.2)
        mixed = step(decodes, 600, [most])
        found = learned.prompts_within(device.seconds(mixed), decodes, 600 * decodes)
        cost = learned.cost
        assert found == pytest.approx(most * cost.token_s + most**2 / 2 * cost.pair_s, rel=0.3)


def test_steps_without_prompts_make_nobody_forget_what_prompts_cost():
    learned = LearnedCost(StepCost.assumed(TimedSteps(0.004, 1e-5)))
    show(learned, DEVICES["8b"], step(64, prompts=[900]), times=200)
    known = learned.cost.token_s
    assert known > 1.5e-5
    show(learned, DEVICES["8b"], step(64), times=5000)
    assert learned.cost.token_s == known


def test_what_rows_cost_is_learned_though_prompts_go_on_beside_them():
    """Rows that are sampled in some costly way, of which none decodes without a prompt beside it."""
    assumed, costly = DEVICES["smollm2-cpu"], replace(DEVICES["smollm2-cpu"], row=10.0)
    learned = LearnedCost(assumed.assumed())
    show(learned, assumed, step(1), times=30)
    before_s = learned.decode_s(8, 4000)
    show(learned, costly, step(6, prompts=[4]), step(9, prompts=[2]), times=5)
    assert learned.decode_s(8, 4000) > 1.3 * before_s
    assert learned.decode_s(8, 4000) == pytest.approx(costly.seconds(step(8)), rel=0.2)


def test_a_long_prompt_that_took_longer_than_expected_is_no_news_of_decodes():
    device = DEVICES["smollm2-cpu"]
    learned = LearnedCost(device.assumed())
    known_s = learned.decode_s(8, 4000)
    show(learned, replace(device, token=5 * device.token), step(1, prompts=[100]), times=20)
    assert learned.decode_s(8, 4000) == known_s


def test_one_odd_step_moves_little():
    learned = LearnedCost(DEVICES["8b"].assumed())
    show(learned, DEVICES["8b"], step(64), step(64, prompts=[900]), times=300)
    before = learned.cost
    learned.settled(step(64, prompts=[900]), 30.0)  # a kernel was compiled, the host was away
    assert learned.cost.token_s < 1.1 * before.token_s


def test_a_step_that_waits_for_masks_tells_nothing_and_one_in_eight_without_prompts_is_enough():
    learned = LearnedCost(DEVICES["8b"].assumed())
    before = learned.cost
    learned.settled(step(3, prompts=[900], masked=True), 1.0)
    assert learned.cost == before
    learned.settled(step(3), 0.01)  # the first
    known = learned.cost
    assert known != before
    for _ in range(7):
        learned.settled(step(3), 0.02)
    assert learned.cost == known
    learned.settled(step(3), 0.02)
    assert learned.cost != known


def test_what_scoring_adds_is_learned():
    device, learned = DEVICES["smollm2-cpu"], LearnedCost(DEVICES["smollm2-cpu"].assumed())
    plain, scored = step(2, prompts=[64]), step(2, prompts=[64], scored=True)
    for _ in range(200):
        learned.settled(plain, device.seconds(plain))
        learned.settled(scored, device.seconds(scored) + 64 * 0.005)
    assert learned.cost.scored_s == pytest.approx(0.005, rel=0.15)
