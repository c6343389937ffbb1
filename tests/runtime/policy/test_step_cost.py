"""Step cost: learned from steps whose true cost is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.batch import SAMPLE, SAMPLE_MASKED, PromptLogprobsSpan, ScheduledBatch, ScheduledRow
from runtime.policy.step_cost import LearnedCost, StepCost, TimedSteps
from tests.benches.simulate import DEVICES, Device


def step(decodes=0, context=500, prompts=(), start=0, scored=False, masked=False) -> ScheduledBatch:
    work = SAMPLE_MASKED if masked else SAMPLE
    rows = [ScheduledRow(n, n, context, 1, (), work=work) for n in range(decodes)]
    for n, num in enumerate(prompts, start=decodes):
        span = PromptLogprobsSpan(start + 1, (1,) * num, 1) if scored else None
        rows.append(ScheduledRow(n, n, start, num, (1,) * num, work=SAMPLE, prompt_logprobs=span))
    return ScheduledBatch(tuple(rows), sum(row.num_tokens for row in rows), 0)


def cpu() -> tuple[Device, LearnedCost]:
    device = DEVICES["smollm2-cpu"]
    return device, LearnedCost(device.assumed())


def example() -> LearnedCost:
    """Cost with 10 ms a step and 2 ms a row."""
    return LearnedCost(StepCost(0.010, 0.001, 0.002, 1e-6, 0.0, 0.0))


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
        assert learned.decode_s(decodes, 600 * decodes) == pytest.approx(device.seconds(step(decodes, 600)), rel=0.35)
        mixed = step(decodes, 600, [most // 2])
        assert learned.expected_s(mixed) == pytest.approx(device.seconds(mixed), rel=0.35)


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
    learned = LearnedCost(DEVICES["8b"].assumed(), every=8)
    before = learned.cost
    learned.settled(step(3, prompts=[900], masked=True), 1.0)
    assert learned.cost == before
    learned.settled(step(3), 0.01)  # the first
    known = learned.cost
    assert known != before
    for _ in range(7):
        learned.settled(step(3), 0.004)
    assert learned.cost == known
    learned.settled(step(3), 0.004)
    assert learned.cost != known


def test_prompts_with_logprobs_are_expected_to_take_longer():
    device, learned = cpu()
    plain, scored = step(2, prompts=[64]), step(2, prompts=[64], scored=True)
    for _ in range(200):
        learned.settled(plain, device.seconds(plain))
        learned.settled(scored, device.seconds(scored) + 64 * 2 * device.token / 1000)
    for batch, more_s in ((plain, 0.0), (scored, 64 * 2 * device.token / 1000)):
        assert learned.expected_s(batch) == pytest.approx(device.seconds(batch) + more_s, rel=0.1)


def test_what_a_row_takes_alone_is_not_learned_from_steps_with_prompts():
    """Prompts that cost more the deeper they are, and scatter: errors of what is expected must not lengthen what is allowed."""
    (device, learned), rng = cpu(), random.Random(7)
    show(learned, device, step(1, context=50), times=20)
    known_s = learned.alone_s(1, 50)
    assert known_s == pytest.approx(device.seconds(step(1, context=50)))
    for number in range(400):
        mixed = step(1, context=50, prompts=[8], start=10 * number)
        learned.settled(mixed, device.seconds(mixed) * rng.lognormvariate(0.2, 0.4))
    assert learned.decode_s(1, 50) == learned.alone_s(1, 50) == known_s


def test_steps_with_prompts_that_scatter_are_expected_to_take_no_less_than_they_do():
    """Decodes are taken for shorter than their mean, and prompts for as much longer."""
    (device, learned), rng = cpu(), random.Random(7)
    mixed = step(2, prompts=[40])
    for _ in range(400):
        learned.settled(step(2), rng.choice([0.6, 1.0, 1.0, 1.8]) * device.seconds(step(2)))
        learned.settled(mixed, rng.choice([0.6, 1.0, 1.0, 1.8]) * device.seconds(mixed))
    assert learned.expected_s(mixed) > 0.95 * 1.1 * device.seconds(mixed)


def test_many_rows_make_nobody_forget_what_one_takes():
    device, learned = cpu()
    costly = replace(device, row=8.0)
    show(learned, device, step(1), times=20)
    show(learned, costly, step(12), times=1000)
    assert learned.decode_s(12, 6000) == pytest.approx(costly.seconds(step(12)), rel=0.05)
    assert learned.decode_s(1, 500) == pytest.approx(device.seconds(step(1)), rel=0.1)
    assert learned.alone_s(1, 500) == pytest.approx(device.seconds(step(1)))


def test_of_rows_that_were_never_alone_fewer_say_what_they_would_take():
    learned = example()
    assert learned.alone_s(3, 1000) == pytest.approx(0.017)  # as assumed
    for _ in range(3):
        learned.settled(step(2, context=0), 0.028)  # twice as long
    assert learned.alone_s(2, 0) == pytest.approx(0.028)
    assert learned.alone_s(2, 1000) == pytest.approx(0.030)
    assert learned.alone_s(4, 0) == pytest.approx(0.036)
    assert learned.alone_s(1, 0) == pytest.approx(0.024)
    learned.settled(step(2, context=0), 5.0)  # the host was away
    assert learned.alone_s(2, 0) == pytest.approx(0.028)


def test_what_else_a_machine_does_for_a_while_makes_nobody_believe_that_rows_take_longer():
    learned = example()
    for took_s in [0.012] * 16 + [0.030] * 11:
        learned.settled(step(1, context=0), took_s)
    assert learned.alone_s(1, 0) == pytest.approx(0.012)
    for _ in range(5):  # it goes on
        learned.settled(step(1, context=0), 0.030)
    assert learned.alone_s(1, 0) == pytest.approx(0.030)


def test_a_prompt_that_is_scored_a_token_at_a_time_is_no_decode():
    device, learned = cpu()
    show(learned, device, step(1), times=20)
    known_s, one = learned.decode_s(2, 1000), step(1, prompts=[1], scored=True)
    for _ in range(100):
        learned.settled(one, device.seconds(one) + 0.010)
    assert learned.decode_s(2, 1000) == known_s
    assert learned.expected_s(one) == pytest.approx(device.seconds(one) + 0.010, rel=0.1)


@pytest.mark.parametrize("batch", [step(decodes=64), step(decodes=8, prompts=(500, 200)), step(prompts=(4096,))])
def test_a_step_is_expected_to_take_what_such_steps_took(batch):
    device = DEVICES["8b"]
    learned = LearnedCost(device.assumed())
    for _ in range(200):
        show(learned, device, step(decodes=8), step(decodes=64), batch)
    assert learned.expected_s(batch) == pytest.approx(device.seconds(batch), rel=0.1)


def test_a_step_without_anything_that_costs_time_changes_no_cost():
    _, learned = cpu()
    empty = ScheduledBatch((ScheduledRow(1, 0, 7, 0, ()),), 0, 0)
    before = learned.cost
    learned.settled(empty, 0.010)
    assert learned.cost == before
