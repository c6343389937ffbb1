"""Step budget: maximum number of prompt tokens in a step that also contains decodes. Pure functions of the load.

Prompt tokens in a step delay running streams; prompt tokens left out delay new requests. At a given throughput the sum of the two
delays is fixed (Little's law), and the budget divides it:
- While prompts are computed in time, a step takes half of `max_itl_s`.
- If waiting prompts would take longer than `target_ttft_s`, the step grows with them, up to `max_itl_s`.
- On a platform with a `Slowdown` (a CPU), a batch takes nearly as long as its sequences one by one. Step time is then also limited
  to a multiple of the decodes' time, which bounds the gaps of a single stream. Requests with many sequences decode in turns
  (`decode_turns.py`).
- Prompts get at least half as much time as the decodes of the step, so they always progress."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from runtime.batch import ScheduledBatch
from runtime.policy.step_cost import LearnedCost, StepCost

# Minimum cost of a prompt token, as a share of its cost at start-up: small steps make tokens look cheaper than in large ones.
# The full cost with a slowdown: kernels for a dozen rows in one pass over the weights need two passes for one more row.
_LEAST_OF_MEASURED = 2 / 3
_BESIDE_PROMPTS = 1.5  # minimum time of a step with prompts, in times of its decodes
_SHARED = 32  # one in so many steps has the narrowest decodes only, to measure their time
_FIRST_ROWS, _GROWTH = 4, 2  # alternating decodes: initial number, and growth factor over the most rows observed
_SURE = 0.95  # share of a step's expected time after which the next step is decided
_EVERY = 8  # without a slowdown, one in so many steps without prompts is observed
WORTHWHILE_TOKENS, SHORTEST_ITL_S, TTFT_PER_ITL = 3072, 0.02, 5.0


class Decodes(NamedTuple):
    """Number of rows that decode, and total number of their context tokens."""

    num_rows: int
    num_context_tokens: int


class EngineLoad(NamedTuple):
    """Load of the engine when a step is scheduled.

    `num_waiting_tokens`: uncomputed tokens of prompts that run or could start. `depth`: number of tokens already computed of
    the current prompt. `narrowest`: decodes of the requests with the fewest rows; None: all decodes. `num_requests`: requests
    with a waiting prompt or shared decode steps. They count as 1 if all belong to one caller and another caller has a stream."""

    num_decodes: int
    num_context_tokens: int  # context tokens of decodes
    num_waiting_tokens: int
    depth: int = 0
    narrowest: Decodes | None = None
    num_requests: int = 1


class StepBudget:
    """Budget without a limit of prompt tokens. Base class of the other budgets.

    `has_turns`: steps may contain only some of the decodes. `ending_cost`: cost of sampling after a prompt, in prompt tokens."""

    __slots__ = ()
    has_turns = False
    ending_cost = 0

    def num_decodes(self, most: EngineLoad) -> int:
        """Return the maximum number of decodes in a step under the load `most`. Called only if `has_turns`."""
        return most.num_decodes

    def is_for_narrowest(self) -> bool:
        """Return True if the next step with prompts should decode only the requests with the fewest rows. Called if `has_turns`."""
        return False

    def prompt_tokens(self, load: EngineLoad) -> int | None:
        """Return the maximum number of prompt tokens in a step with decodes, at least 1. None: only the token limit of all
        steps applies."""
        return None

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        """Return the delay, in seconds after the start of the step of `batch`, until the next step is scheduled. A late time
        includes more arriving requests, but must be before the device becomes idle. 0: at once."""
        return 0.0

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        """Learn step times. The step of `batch` took `took_s` seconds."""


@dataclass(frozen=True, slots=True)
class FixedBudget(StepBudget):
    """Budget with a fixed number of prompt tokens in steps with decodes; None: no limit."""

    num_tokens: int | None

    def prompt_tokens(self, load: EngineLoad) -> int | None:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Maximum time of a step with prompts and decodes, as a multiple of the time of its narrowest decodes. `by_one`: applies if
    one other request or caller shares steps. `by_many`: applies if there are more."""

    by_one: float
    by_many: float


class Lead(NamedTuple):
    """Time that the host needs, before a step ends, to record the previous step's results and launch the next step. Sum of
    `step_s` seconds per step and `row_s` seconds per row."""

    step_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class PlatformSteps:
    """Defaults of a platform. `longest_itl_s`: upper bound of the default `max_itl_s`, in seconds. `least_tokens`: minimum
    number of prompt tokens worth adding to a step. `lead`: see `Lead`; None schedules the next step when one begins."""

    longest_itl_s: float
    least_tokens: int
    slowdown: Slowdown | None = None
    lead: Lead | None = None


@dataclass(frozen=True, slots=True)
class Goals:
    max_itl_s: float
    target_ttft_s: float
    slowdown: Slowdown | None = None

    @classmethod
    def resolve(
        cls, max_itl_s: float | None, target_ttft_s: float | None, token_s: float, platform: PlatformSteps
    ) -> Goals:
        """Return the goals, with defaults for None. The default `max_itl_s` is the time of WORTHWHILE_TOKENS prompt tokens,
        within the platform's bounds. The default `target_ttft_s` is TTFT_PER_ITL times `max_itl_s`."""
        slowdown = None
        if max_itl_s is None:
            max_itl_s = min(max(WORTHWHILE_TOKENS * token_s, SHORTEST_ITL_S), platform.longest_itl_s)
            slowdown = platform.slowdown
        return cls(max_itl_s, TTFT_PER_ITL * max_itl_s if target_ttft_s is None else target_ttft_s, slowdown)


class TimedBudget(StepBudget):
    """Budget that keeps step times within `goals`, based on learned step costs. It allows at least `least` prompt tokens,
    unless a slowdown forbids that."""

    def __init__(self, cost: StepCost, goals: Goals, *, least: int = 1, lead: Lead | None = None) -> None:
        self.goals = goals
        self.has_turns = goals.slowdown is not None
        self.learned = LearnedCost(cost, every=1 if self.has_turns else _EVERY)
        self.ending_cost = round(cost.row_s / cost.token_s) if self.has_turns else 0
        self._least = least
        self._num_shared = 0
        self._lead = lead

    def step_s(self, load: EngineLoad) -> float:
        """Return the maximum time of a step under `load`, in seconds."""
        goals = self.goals
        waiting_s = load.num_waiting_tokens * self.learned.cost.token_s
        in_time_s = 0.5 * goals.max_itl_s * max(1.0, waiting_s / goals.target_ttft_s)
        decode_s = self.learned.alone_s(load.num_decodes, load.num_context_tokens)
        return max(min(in_time_s, goals.max_itl_s, self._slowed_s(load)), _BESIDE_PROMPTS * decode_s)

    def num_decodes(self, most: EngineLoad) -> int:
        num_rows = most.num_decodes
        step_s = min(self._slowed_s(most), self.goals.max_itl_s)
        if most.num_waiting_tokens:
            step_s /= _BESIDE_PROMPTS
        known = min(num_rows, max(_FIRST_ROWS, _GROWTH * self.learned.most_rows))
        context = most.num_context_tokens / max(1, num_rows)
        return bisect_right(range(1, known + 1), step_s, key=lambda num: self.learned.decode_s(num, int(num * context)))

    def is_for_narrowest(self) -> bool:
        self._num_shared = (self._num_shared + 1) % _SHARED
        return not self._num_shared

    def _slowed_s(self, load: EngineLoad) -> float:
        slowdown = self.goals.slowdown
        if slowdown is None:
            return math.inf
        narrowest = load.narrowest or Decodes(load.num_decodes, load.num_context_tokens)
        return (slowdown.by_many if load.num_requests > 1 else slowdown.by_one) * self.learned.alone_s(*narrowest)

    def prompt_tokens(self, load: EngineLoad) -> int | None:
        least = self._least
        if self.goals.slowdown is not None:
            least = min(least, self._tokens(load, self._slowed_s(load)))
        return max(1, least, self._tokens(load, self.step_s(load)))

    def _tokens(self, load: EngineLoad, step_s: float) -> int:
        """Return how many prompt tokens fit in a step of `step_s` seconds."""
        cost, least_s = self.learned.cost, self.learned.assumed.token_s
        if self.goals.slowdown is None:
            least_s *= _LEAST_OF_MEASURED
        else:  # if rows are faster than at start-up, when other processes used the cores, so are tokens
            least_s *= min(1.0, self.learned.alone_factor(1))
        token_s = max(cost.token_s + load.depth * cost.pair_s, least_s)
        return int(self.learned.prompts_within(step_s, load.num_decodes, load.num_context_tokens) / token_s)

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        lead, cost = self._lead, self.learned.cost
        if lead is None or cost.base_s + cost.token_s * batch.num_tokens < 2 * lead.step_s:
            return 0.0  # the step ends before its time could be computed
        return max(0.0, _SURE * self.learned.expected_s(batch) - lead.step_s - lead.row_s * len(batch.rows))

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        self.learned.settled(batch, took_s)
