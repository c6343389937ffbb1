"""Fair sharing between callers: nobody starves, nobody saves up, and one caller alone is served as they come."""

from __future__ import annotations

import random

import pytest

from runtime.api import FinishReason, Request, SamplingParams
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import MAX_COUNTERS, POLICIES, Fair
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from tests.invariants import check_pool


class Service:
    """A scheduler whose every step comes back at once, and what each caller got of it, in tokens."""

    def __init__(self, policy="fair", seqs=4, budget=64, mixed=None, num_blocks=4000) -> None:
        limits = SchedulerLimits(seqs, budget, frozenset(), mixed)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks), PrefixCache(4, False), POLICIES[policy]())
        self.started: list[str] = []
        self.got: dict[str, int] = {}
        self.num = 0

    def ask(self, caller: str, times=1, prompt=8, output=8, *, priority=0) -> list[Sequence]:
        asked = []
        for _ in range(times):
            self.num += 1
            params = SamplingParams(output, ignore_eos=True)
            request = Request(caller, [self.num % 90 + 5] * prompt, params, priority, caller=caller.encode())
            asked.append(Sequence(request, number=self.num, max_model_len=10_000, seed=0))
            self.scheduler.add(asked[-1])
        return asked

    def step(self, times=1) -> None:
        for _ in range(times):
            batch = self.scheduler.schedule()
            if batch is None:
                return
            for row in batch.rows:
                name = self.scheduler.sequences.find(row.number).request.id
                self.got[name] = self.got.get(name, 0) + row.num_tokens
                if row.binding is not None:
                    self.started.append(name)
            self.scheduler.settle(batch, [[3]] * len(batch.sampling_rows))
        check_pool(self.scheduler)


def test_a_thousand_requests_of_one_do_not_starve_the_one_of_another():
    service = Service()
    service.ask("many", 1000)
    service.step(50)
    begun = len(service.started)
    (one,) = service.ask("one")
    while one.num_output_tokens == 0:
        service.step()
    assert service.started[begun:].index("one") <= 4  # those of a step at most
    first_come = Service("fcfs")
    first_come.ask("many", 1000)
    first_come.step(50)
    first_come.ask("one")
    first_come.step(200)
    assert "one" not in first_come.started


def test_callers_get_alike_whatever_the_length_of_what_they_ask():
    service = Service(seqs=6)
    for caller, times, prompt, output in (("short", 900, 4, 4), ("long", 90, 40, 60), ("wordy", 60, 4, 120)):
        service.ask(caller, times, prompt, output)
    service.step(1500)
    weighted = service.scheduler.policy._counters.values()
    assert max(weighted) - min(weighted) < 2 * (40 + 2 * 120)  # of 7,000 each
    assert min(weighted) > 4000


def test_a_long_prompt_of_one_holds_the_other_up_for_a_step():
    service = Service(budget=64)
    service.ask("long", prompt=5000)
    service.step(3)
    service.ask("other", prompt=10)
    service.step(2)
    assert service.got["other"] >= 10
    assert service.scheduler.running[0].num_computed_tokens > 64 * 3  # and goes on meanwhile


def test_two_long_prompts_take_turns():
    service = Service(budget=64)
    service.ask("a", prompt=3000)
    service.ask("b", prompt=3000)
    service.ask("a", prompt=3000)  # somebody waits: there is something to share
    service.ask("b", 9, prompt=3000)
    service.step(60)
    assert abs(service.got["a"] - service.got["b"]) <= 64


def test_nobody_saves_up_while_he_asks_for_nothing():
    service = Service(seqs=2)
    service.ask("busy", 400)
    service.step(300)
    service.ask("late", 400)
    before = dict(service.got)
    service.step(300)
    gained = {name: service.got[name] - before.get(name, 0) for name in service.got}
    assert gained["late"] == pytest.approx(gained["busy"], rel=0.1)


def test_what_was_had_while_nobody_waited_is_not_held_against_anybody():
    service = Service(seqs=2)
    service.ask("early", 2, output=500)
    service.step(400)
    service.ask("early", 50)
    service.ask("other", 50)
    service.step(250)
    begun = service.started[2:]
    # 200 tokens of the first two were still to come, which count twice; the 800 before them do not.
    assert (begun.count("other") - begun.count("early")) * (8 + 2 * 8) <= 2 * 200 + 2 * (8 + 2 * 8)


def test_who_is_preempted_does_not_pay_twice():
    service = Service(seqs=3, num_blocks=30)
    service.ask("a", 6, prompt=12, output=40)
    service.ask("b", 6, prompt=12, output=40)
    while service.scheduler.running or service.scheduler.waiting:
        service.step()
    assert service.scheduler.sequences.num_preemptions
    assert sorted(service.started[:2]) == ["a", "b"]


def test_one_caller_alone_is_served_as_they_come():
    def batches(policy: str) -> list:
        service, rng = Service(policy, budget=24, mixed=8), random.Random(3)
        found = []
        for _ in range(200):
            if rng.random() < 0.5:
                service.ask("one", prompt=rng.randrange(1, 40), output=rng.randrange(1, 9))
            batch = service.scheduler.schedule()
            if batch is not None:
                found.append(batch)
                service.scheduler.settle(batch, [[3]] * len(batch.sampling_rows))
        return found

    assert batches("fair") == batches("fcfs")


def test_counters_of_callers_who_have_left_are_forgotten():
    service = Service(seqs=1)
    service.ask("holds", output=100_000 // 64)
    service.step()
    service.ask("waits")
    for number in range(3 * MAX_COUNTERS):
        (passing,) = service.ask(f"passes {number}")
        service.scheduler.finish(passing, FinishReason.ABORT)
    policy = service.scheduler.policy
    assert isinstance(policy, Fair)
    assert len(policy._counters) <= MAX_COUNTERS + 1
    assert set(policy._waiting) == {b"waits"}


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_of_those_that_have_ended(policy):
    service, rng = Service(policy, num_blocks=40), random.Random(1)
    asked: list[Sequence] = []
    for _ in range(300):
        if rng.random() < 0.4:
            asked += service.ask(
                rng.choice("abc"), 1, rng.randrange(1, 30), rng.randrange(1, 30), priority=rng.randrange(3)
            )
        if asked and rng.random() < 0.1:
            victim = asked.pop(rng.randrange(len(asked)))
            if victim.finish is None:
                service.scheduler.finish(victim, FinishReason.ABORT)
        service.step()
    while service.scheduler.running or service.scheduler.waiting:
        service.step()
    left = vars(service.scheduler.policy)
    assert [name for name in ("_waiting", "_started", "_counted") if left.get(name)] == []
