"""Step budget: who waits for whom, and how long."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from runtime.api import Request, SamplingParams
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy import FirstCome
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from runtime.step_budget import FixedBudget, Goals, Load, PlatformSteps, TimedBudget
from runtime.step_cost import StepCost
from tests.simulate import DEVICES, ON_CPU, Arrival, Traffic, burst, closed, simulate

COST = StepCost(base_s=0.004, token_s=2e-5, row_s=2e-5, context_s=0.0, pair_s=1e-9, scored_s=4e-5)
GOALS = Goals(max_itl_s=0.070, target_ttft_s=0.350)


def budget(least=1) -> TimedBudget:
    return TimedBudget(COST, GOALS, least=least)


def test_while_prompts_are_served_in_time_a_step_takes_half_of_what_it_may():
    assert budget().step_s(Load(8, 4000, 500)) == pytest.approx(0.035)
    assert budget().step_s(Load(8, 4000, 17_500)) == pytest.approx(0.035)  # what 350 ms compute


def test_the_more_wait_the_longer_a_step_up_to_what_it_may_take():
    assert budget().step_s(Load(8, 4000, 26_250)) == pytest.approx(0.0525)
    assert budget().step_s(Load(8, 4000, 10_000_000)) == pytest.approx(0.070)


def test_beside_many_decodes_there_is_room_for_fewer_prompts_and_never_for_none():
    tokens = [budget().prompt_tokens(Load(decodes, 0, 500)) for decodes in (1, 64, 256, 1024, 4096)]
    assert tokens[:3] == sorted(tokens[:3], reverse=True)
    assert tokens[0] == pytest.approx(1690, abs=40)
    # 4,096 decodes take 86 ms, so the step may take 129.
    assert tokens[4] == pytest.approx(2_270, abs=20)
    assert budget(least=256).prompt_tokens(Load(1700, 0, 500)) >= 256


def test_deep_in_a_prompt_tokens_cost_more():
    flat, deep = (budget().prompt_tokens(Load(1, 0, 500, depth)) for depth in (0, 20_000))
    assert deep == pytest.approx(flat / 2, rel=0.01)


def test_a_scored_token_counts_for_what_it_costs():
    assert budget().scored_cost() == 3


@pytest.mark.parametrize(
    ("asked", "token_s", "goals"),
    [
        ((None, None), 2.3e-5, Goals(0.07, pytest.approx(0.35), 4.0)),  # 8B on an H200
        ((None, None), 2.2e-6, Goals(0.02, pytest.approx(0.1), 4.0)),  # 0.6B
        ((None, None), 1.3e-5, Goals(pytest.approx(0.04, abs=0.001), pytest.approx(0.2, abs=0.003), 4.0)),
        ((0.05, None), 2.3e-5, Goals(0.05, 0.25)),
        ((0.05, 1.0), 2.3e-5, Goals(0.05, 1.0)),
    ],
)
def test_goals_that_are_not_given_follow_from_the_model(asked, token_s, goals):
    assert Goals.resolve(*asked, token_s, PlatformSteps(0.07, 256, max_slowdown=4.0)) == goals


def test_a_fixed_budget_is_that():
    assert FixedBudget(7).prompt_tokens(Load(1, 1, 1)) == 7
    assert FixedBudget(None).prompt_tokens(Load(1, 1, 1)) is None


def timed(name: str) -> TimedBudget:
    cost, platform = DEVICES[name].assumed(), DEVICES[name].platform
    goals = Goals.resolve(None, None, cost.token_s, platform)
    return TimedBudget(cost, goals, least=min(32, platform.least_tokens))


def test_in_a_burst_streams_stay_even_at_next_to_no_cost():
    """What is simulated: the real scheduler, on steps that take what a formula says."""
    traffic = burst(48, (1000, 4000), (16, 64))
    free, kept = (simulate(DEVICES["8b"], each, traffic) for each in (FixedBudget(None), timed("8b")))
    assert free.itl_s(100) > 0.18
    assert kept.itl_s(100) < 0.10  # while the cost of steps is being learned; 70 ms is the goal
    assert kept.total_s < 1.05 * free.total_s
    assert kept.e2e_s(50) < free.e2e_s(50)


def test_a_closed_loop_has_its_first_tokens_sooner_at_the_same_throughput():
    traffic = closed(48, 144, 512, 32)
    free, kept = (simulate(DEVICES["8b"], each, traffic) for each in (FixedBudget(None), timed("8b")))
    assert kept.tokens_per_s > 0.97 * free.tokens_per_s
    assert kept.ttft_s(50) < free.ttft_s(50)
    assert kept.ttft_s(99) < 1.1 * free.ttft_s(99)


def test_on_a_cpu_streams_beside_long_prompts_wait_for_less_than_a_tenth_of_a_second():
    traffic = closed(4, 8, 800, 24)
    free, kept = (simulate(DEVICES["smollm2-cpu"], each, traffic) for each in (FixedBudget(None), timed("smollm2-cpu")))
    assert free.itl_s(100) > 0.5
    assert kept.itl_s(100) < 0.1
    assert kept.tokens_per_s > 0.8 * free.tokens_per_s


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(60, 475), (3, 3000), (30, 20)])
def test_on_a_cpu_a_stream_beside_any_number_of_prompts_waits_no_more_than_so_many_times_as_long(
    num_prompts, num_tokens
):
    device = DEVICES["smollm2-cpu"]
    prompts = [Arrival(1.0, num_tokens, 1) for _ in range(num_prompts)]
    found = simulate(device, timed("smollm2-cpu"), Traffic([Arrival(0.0, 10, 2500), *prompts]))
    (stream,) = [answer for answer in found.answers if answer.arrival.num_output > 1]
    gaps_s = [*pairwise(stream.times_s)]
    before = [late - early for early, late in gaps_s if late < 1.0]
    during = [late - early for early, late in gaps_s if late >= 1.0]
    assert len(during) > 30
    usual_s = statistics.median(before)
    assert statistics.quantiles(during, n=20)[18] < 1.1 * ON_CPU.max_slowdown * usual_s
    assert max(during) < 1.3 * ON_CPU.max_slowdown * usual_s  # where the ends of several prompts come together
    served = [answer for answer in found.answers if answer is not stream]
    assert len(served) == num_prompts
    assert max(answer.ttft_s for answer in served) < 1.6 * num_prompts * num_tokens * device.token / 1000 + 0.5


def test_what_waits_counts_without_what_the_prefix_cache_will_probably_have():
    loads: list[Load] = []

    class Noted(FixedBudget):
        def prompt_tokens(self, load: Load) -> int | None:
            loads.append(load)
            return super().prompt_tokens(load)

    limits = SchedulerLimits(8, 4096, frozenset())
    scheduler = Scheduler(limits, BlockPool(4000), PrefixCache(16), FirstCome(), step_budget=Noted(None))

    def ask(number: int, prompt: list[int], num_output: int) -> None:
        request = Request(str(number), prompt, SamplingParams(num_output, ignore_eos=True))
        scheduler.add(Sequence(request, number=number, max_model_len=4096, seed=0))

    ask(0, [5] * 10, 1000)
    shared = [7] * 960
    for number in range(1, 80):
        ask(number, [*shared, *[number + 10] * 40], 1)
        batch = scheduler.schedule()
        scheduler.settle(batch, [[3]] * len(batch.sampling_rows))
    assert loads[0].num_waiting_tokens == pytest.approx(1000, rel=0.2)  # nobody knows yet
    assert loads[-1].num_waiting_tokens == pytest.approx(40, rel=0.2)
