"""Traffic against the real scheduler, on steps that take what a formula says in place of a device: what a step budget does to
waiting times. `python -m tests.benches.simulate [MODEL …] [--fixed N …] [--goals ITL:TTFT …]`, in milliseconds.

The formulas are fits of one H200 and of a 2-core CPU (RESULTS.md has the figures). Beside what was measured there over HTTP with
1,024 tokens beside decodes, 8B: c128 6,509 tok/s (measured 6,329), TTFT p50 114 (150) and p99 1,708 (1,772), TPOT p50 18.6 (18.9);
c256 14,762 (14,157), 128 (174), 1,809 (2,196), 16.5 (16.6); the burst 42.9 s (44.6). Without a limit: 6,442 (6,491), 564 (736),
15.5 (13.9)."""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from runtime import sequence as sequences
from runtime.api import Request, SamplingParams
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.policy.step_budget import FixedBudget, Goals, Lead, PlatformSteps, Slowdown, StepBudget, TimedBudget
from runtime.policy.step_cost import StepCost, TimedSteps
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation

STEPS_IN_FLIGHT = 2
ON_CPU, ON_CUDA = (
    PlatformSteps(0.2, 16, Slowdown(2.0, 5.0)),
    PlatformSteps(0.07, 256, lead=Lead(0.003, 4e-5)),
)  # as the platforms have them
THINK_S = 0.0005  # a closed loop's client, between two requests


@dataclass(frozen=True, slots=True)
class Device:
    """Milliseconds: of a step, however little is in it, of each token, of each token of context that a decode reads, of each pair
    of a prompt's token and one before it, of each row, on the host of each row; of having drafts at all, and of launching a step,
    for which the device waits where it has no other; of a step that what makes drafts on the device follows, and of each round of
    guesses. What is read and what is computed overlap by `overlap`."""

    base: float
    token: float
    context: float
    pair: float
    row: float = 0.0
    host: float = 0.0
    drafts: float = 0.0
    launch: float = 0.0
    follow: float = 0.0
    guess: float = 0.0
    overlap: float = 1.3
    budget: int = 8192
    seqs: int = 512
    kv_share: float = 8e-6  # bytes that a token has in the KV cache, in those of the weights
    on_cpu: bool = False

    @property
    def platform(self) -> PlatformSteps:
        return ON_CPU if self.on_cpu else ON_CUDA

    def seconds(self, batch: ScheduledBatch) -> float:
        context = pairs = 0.0
        drafts = self.drafts if any(row.draft_ids for row in batch.rows) else 0.0
        for row in batch.rows:
            if row.num_tokens == 1 + len(row.draft_ids):
                context += row.end
            else:
                pairs += row.num_tokens * (row.start + row.num_tokens / 2)
        computed = (self.token * batch.num_tokens) ** self.overlap + self.base**self.overlap
        total = (
            computed ** (1 / self.overlap)
            + self.context * context
            + self.pair * pairs
            + self.row * len(batch.rows)
            + drafts
            + (self.follow if batch.follows else 0.0)
            + self.guess * max((row.num_proposed for row in batch.rows), default=0)
        )
        return max(total, self.host * len(batch.sampling_rows)) / 1000

    def assumed(self) -> StepCost:
        """What a start would find: the smallest step, which a GPU launches kernel by kernel then, so too slow, and a token of the
        largest; on a CPU what a row adds, too."""
        base, token = self.base / 1000, self.token / 1000
        if self.on_cpu:
            return StepCost.assumed(TimedSteps(base, token, token + self.row / 1000), self.kv_share)
        return StepCost.assumed(TimedSteps(2 * base, token + base / self.budget), self.kv_share)


DEVICES = {
    "8b": Device(4.2, 0.0225, 3.05e-5, 9.7e-7),
    "0.6b": Device(0.74, 0.00206, 2.72e-5, 3.96e-7, row=0.0025, host=0.022, kv_share=9e-5),
    "smollm2-cpu": Device(9.6, 1.1, 4e-4, 1e-4, row=2.5, overlap=1.0, budget=512, seqs=64, kv_share=2e-4, on_cpu=True),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float
    num_prompt: int
    num_output: int
    client: int = -1  # of a closed loop: it sends another when this one is answered
    width: int = 1  # answers to the prompt
    caller: bytes | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """`again`: how many requests a closed loop sends after its first ones."""

    arrivals: Sequence[Arrival]
    again: int = 0


def closed(streams: int, total: int, num_prompt: int, num_output: int) -> Traffic:
    first = [Arrival(index * 2e-5, num_prompt, num_output, index) for index in range(streams)]
    return Traffic(first, total - streams)


def poisson(per_s: float, total: int, num_prompt: int, num_output: int, seed: int = 1) -> Traffic:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(total):
        now += rng.expovariate(per_s)
        arrivals.append(Arrival(now, num_prompt, num_output))
    return Traffic(arrivals)


def burst(total: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 2) -> Traffic:
    rng = random.Random(seed)
    return Traffic([Arrival(0.0, rng.randint(*prompts), rng.randint(*outputs)) for _ in range(total)])


@dataclass(slots=True)
class Answer:
    arrival: Arrival
    arrived_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.arrived_s

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / max(1, len(self.times_s) - 1)

    @property
    def gaps_s(self) -> Iterator[float]:
        return (late - early for early, late in zip(self.times_s, self.times_s[1:], strict=False))


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    answers: Sequence[Answer]
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.times_s) for answer in self.answers) / self.total_s

    def ttft_s(self, percent: int) -> float:
        return percentile([answer.ttft_s for answer in self.answers], percent)

    def tpot_s(self, percent: int) -> float:
        return percentile([answer.tpot_s for answer in self.answers], percent)

    def itl_s(self, percent: int) -> float:
        return percentile([gap for answer in self.answers for gap in answer.gaps_s], percent)

    def e2e_s(self, percent: int) -> float:
        return percentile([answer.times_s[-1] - answer.arrived_s for answer in self.answers], percent)


def one_each(row: ScheduledRow) -> list[int]:
    """What a row gains that has no drafts."""
    return [1]


def simulate(
    device: Device, budget: StepBudget, traffic: Traffic, policy: str = "fair", speculation: Speculation | None = None,
    gained: Callable[[ScheduledRow], list[int]] = one_each,
) -> Outcome:  # fmt: skip
    """`gained`: what a sampling row does."""
    limits = SchedulerLimits(device.seqs, device.budget, frozenset())
    pool, prefixes = BlockPool(60_000), PrefixCache(16, False)
    features = [] if speculation is None else [DraftScheduling(speculation)]
    scheduler = Scheduler(limits, pool, prefixes, POLICIES[policy](), step_budget=budget, features=features)
    coming = [(arrival.time_s, number, arrival) for number, arrival in enumerate(traffic.arrivals)]
    heapq.heapify(coming)
    again, num_arrivals, number, now, free_s = traffic.again, len(coming), 0, 0.0, 0.0
    open_answers: dict[int, Answer] = {}
    answers: list[Answer] = []
    in_flight: deque[tuple[ScheduledBatch, float, float, float]] = deque()
    while True:
        if len(in_flight) == 1:
            (running, end_s, took_s, _) = in_flight[0]
            now = max(now, min(end_s, end_s - took_s + budget.decide_after_s(running)))
        while coming and coming[0][0] <= now:
            _, group, arrival = heapq.heappop(coming)
            params = SamplingParams(arrival.num_output, ignore_eos=True)
            request = Request(str(group), range(arrival.num_prompt), params, arrival_s=now, caller=arrival.caller)
            for _ in range(arrival.width):
                open_answers[number] = Answer(arrival, arrival.time_s)
                scheduler.add(sequences.Sequence(request, number=number, max_model_len=1 << 20, seed=0, group=group))
                number += 1
        batch = scheduler.schedule()
        if batch is not None:
            took_s = device.seconds(batch)
            waited_s = device.launch / 1000 if free_s <= now else 0.0
            free_s = max(now, free_s) + waited_s + took_s
            in_flight.append((batch, free_s, took_s, waited_s))
        if in_flight and (batch is None or len(in_flight) == STEPS_IN_FLIGHT):
            done, end_s, took_s, waited_s = in_flight.popleft()
            now = max(now, end_s)
            budget.settled(done, took_s)
            if speculation is not None:
                speculation.record_step(done, took_s + waited_s)
            for settled in scheduler.settle(done, [gained(row) for row in done.sampling_rows]):
                answer = open_answers[settled.sequence.number]
                answer.times_s += [now] * len(settled.token_ids)
                if settled.finish is not None:
                    answers.append(open_answers.pop(settled.sequence.number))
                    if answer.arrival.client >= 0 and again:
                        again -= 1
                        arrival = answer.arrival
                        late = Arrival(now + THINK_S, arrival.num_prompt, arrival.num_output, arrival.client)
                        heapq.heappush(coming, (late.time_s, num_arrivals, late))
                        num_arrivals += 1
        elif batch is None:
            if not coming:
                return Outcome(answers, now)
            now = max(now, coming[0][0])


def workloads(name: str) -> dict[str, Traffic]:
    if name == "smollm2-cpu":
        return {
            "c4_128_64": closed(4, 24, 128, 64),
            "c16_128_64": closed(16, 64, 128, 64),
            "c4_800_64": closed(4, 12, 800, 64),
        }
    saturated = {"8b": 51.0, "0.6b": 235.0}[name]
    shares = {f"poisson {share} %": poisson(saturated * share / 100, 500, 512, 128) for share in (50, 70, 90, 110)}
    loops = {"c32": closed(32, 192, 512, 128), "c128": closed(128, 640, 512, 128), "c256": closed(256, 768, 256, 256)}
    return loops | shares | {"burst": burst(512, (1000, 4000), (64, 256))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("models", nargs="*", default=list(DEVICES), metavar="MODEL")
    parser.add_argument("--fixed", nargs="*", type=int, default=[1024, 0], metavar="N", help="tokens; 0: no limit")
    parser.add_argument("--goals", nargs="*", default=["auto"], metavar="ITL:TTFT", help="milliseconds, or auto")
    given = parser.parse_args()
    for name in given.models:
        device = DEVICES[name]
        for title, traffic in workloads(name).items():
            budgets: dict[str, StepBudget] = {f"{num or 'no limit'}": FixedBudget(num or None) for num in given.fixed}
            for text in given.goals:
                itl, _, ttft = text.partition(":")
                asked = (None, None) if itl == "auto" else (float(itl) / 1000, float(ttft) / 1000 if ttft else None)
                goals = Goals.resolve(*asked, device.assumed().token_s, device.platform)
                budgets[text] = TimedBudget(
                    device.assumed(), goals, least=device.platform.least_tokens, lead=device.platform.lead
                )
            for what, budget in budgets.items():
                found = simulate(device, budget, traffic)
                ms = [1000 * value for value in (
                    found.ttft_s(50), found.ttft_s(99), found.tpot_s(50), found.tpot_s(99), found.itl_s(50), found.itl_s(99),
                    found.itl_s(100), found.e2e_s(50), found.e2e_s(99),
                )]  # fmt: skip
                print(
                    f"{name:11} {title:13} {what:9} {found.tokens_per_s:7.0f} tok/s {found.total_s:6.2f} s  TTFT {ms[0]:6.0f}"
                    f" {ms[1]:6.0f}  TPOT {ms[2]:6.2f} {ms[3]:6.2f}  ITL {ms[4]:6.2f} {ms[5]:6.1f} {ms[6]:5.0f}  e2e {ms[7]:6.0f}"
                    f" {ms[8]:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
