"""Step budget: how much of prompts a step may hold that running answers share. Pure: it is told what there is, and decides.

Whatever a step holds of prompts, those who read answers wait for, and whatever it does not hold, those wait for whose prompts
these are: at a given throughput the seconds until first tokens and those between tokens have one sum (Little's law), and this
says who gets them. While prompts are served in time a step takes half of the greatest time between tokens, `max_itl_s`. Where
those that wait would take longer than `target_ttft_s` at the rate at which prompts are computed alone, it grows with what
waits, up to all of `max_itl_s`. Where each row of a step costs about what it costs alone, as on a few cores, and an operator says
nothing of it, a step is also bounded by what its decodes take alone: so a single stream has no gaps of many times its own, least
of all beside one request. The bound holds for decodes too, of which wide requests then have some in a step (`decode_turns.py`).
Decodes that take long themselves leave prompts half as long again as they take, however little time that should be: nobody waits
for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.batch import ScheduledBatch
from runtime.policy.step_cost import LearnedCost, StepCost, StepsAlone

# Which a token of a prompt took at the start: small steps make it look cheaper than in large ones. Where a step is bounded by what
# rows take alone it is all of it: kernels that serve a dozen rows in one pass over the weights need two for one row more.
_LEAST_OF_MEASURED = 2 / 3
_BESIDE_PROMPTS = 1.5  # times what decodes take, at least, where prompts wait
_SHARED = 32  # steps, of which one is not, so that what bounds them is what decodes take now
_FIRST_ROWS, _GROWTH = 4, 2  # of decodes that have turns: at first, and how many times as many as any step had
_SURE = 0.95  # of what a step is expected to take, that it does take
WORTHWHILE_TOKENS, SHORTEST_ITL_S, TTFT_PER_ITL = 3072, 0.02, 5.0


class Decodes(NamedTuple):
    """Rows that decode, and the tokens before theirs."""

    num_rows: int
    num_context_tokens: int


class Load(NamedTuple):
    """What there is when a step is decided. `num_waiting_tokens`: of prompts that run or could start, not computed yet. `depth`:
    tokens before those which come next of a prompt that has begun. `narrowest`: of the decodes those of requests that want
    least; None: all. `num_asking`: requests whose prompts wait, or whose decodes take turns; all of one caller are one beside
    the stream of another."""

    num_decodes: int
    num_context_tokens: int  # of those that decode
    num_waiting_tokens: int
    depth: int = 0
    narrowest: Decodes | None = None
    num_asking: int = 1


class StepBudget(Protocol):
    @property
    def has_turns(self) -> bool:
        """Whether decodes may have to take turns."""
        ...

    def num_decodes(self, most: Load) -> int:
        """How many of `most` a step may hold, of which `narrowest` are some; asked where `has_turns`."""
        ...

    def is_for_narrowest(self) -> bool:
        """Whether the next step that has more to do is for its narrowest decodes alone; asked where `has_turns`."""
        ...

    def ending_cost(self) -> int:
        """What the end of a prompt, which is sampled, counts as beside its tokens, in tokens."""
        ...

    def prompt_tokens(self, load: Load) -> int | None:
        """Tokens of prompts that a step may hold beside decodes, 1 at least; None: as many as any step."""
        ...

    def scored_cost(self) -> int:
        """What a token of a prompt that is scored counts as, in tokens."""
        ...

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        """How long after the step of `batch` has begun the next one is to be decided: late, so that whoever comes meanwhile may
        have a place in it, but before the device waits; 0: at once."""
        ...

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        """Note that the step of `batch` took `took_s` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A budget of a fixed number of tokens, whatever a step of them takes; None: no limit."""

    num_tokens: int | None
    has_turns: bool = False

    def num_decodes(self, most: Load) -> int:
        return most.num_decodes

    def is_for_narrowest(self) -> bool:
        return False

    def ending_cost(self) -> int:
        return 0

    def prompt_tokens(self, load: Load) -> int | None:
        return self.num_tokens

    def scored_cost(self) -> int:
        return 3

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        return 0.0

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer a step may take for what requests have in it beside what those that want least decode, in times what these
    take alone: for what one request has, or one caller beside the stream of another, and for any number's."""

    by_one: float
    by_many: float


class Lead(NamedTuple):
    """Seconds before the end of a step in which a host writes what the last one brought, decides the next and launches it: of any
    step, and of each of its rows."""

    step_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class PlatformSteps:
    """What steps are like on a platform, and what holds of them where an operator says nothing. `longest_itl_s`: between two
    tokens. `least_tokens`: of prompts, below which a step does not pay. `slowdown`: of a step, where there is one bound.
    `lead`: with which the next step is decided while one is computed; None: as soon as that begins."""

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
        """The goals that were given. Else time between tokens for what so many tokens of prompts take, so that computing them is
        worth its while, but what is the platform's at most; and five times as long until the first."""
        slowdown = None
        if max_itl_s is None:
            max_itl_s = min(max(WORTHWHILE_TOKENS * token_s, SHORTEST_ITL_S), platform.longest_itl_s)
            slowdown = platform.slowdown
        return cls(max_itl_s, TTFT_PER_ITL * max_itl_s if target_ttft_s is None else target_ttft_s, slowdown)


class TimedBudget:
    """A budget of as many tokens as keep `goals`, by what steps cost; `least` of them at least, as far as a slowdown allows.
    `lead`: as the platform has it."""

    def __init__(self, cost: StepCost, goals: Goals, *, least: int = 1, lead: Lead | None = None) -> None:
        self.goals = goals
        self._alone = StepsAlone(cost)
        self.learned = LearnedCost(cost, None if goals.slowdown is None else self._alone)
        self._least = least
        self._num_shared = 0
        self._lead = lead

    @property
    def has_turns(self) -> bool:
        return self.goals.slowdown is not None

    def step_s(self, load: Load) -> float:
        """What the step is to take at most."""
        goals, decode_s = self.goals, self.learned.decode_s(load.num_decodes, load.num_context_tokens)
        waiting_s = load.num_waiting_tokens * self.learned.cost.token_s
        in_time_s = 0.5 * goals.max_itl_s * max(1.0, waiting_s / goals.target_ttft_s)
        if load.narrowest is not None and load.num_decodes <= load.narrowest.num_rows:
            decode_s = min(decode_s, self._alone.seconds(load.num_decodes, load.num_context_tokens))
        return max(min(in_time_s, goals.max_itl_s, self._slowed_s(load)), _BESIDE_PROMPTS * decode_s)

    def num_decodes(self, most: Load) -> int:
        cost, num_rows = self.learned.cost, most.num_decodes
        step_s = min(self._slowed_s(most), self.goals.max_itl_s)
        if most.num_waiting_tokens:
            step_s /= _BESIDE_PROMPTS
        row_s = cost.row_s + cost.context_s * most.num_context_tokens / max(1, num_rows)
        known = max(_FIRST_ROWS, _GROWTH * self.learned.most_rows)
        return min(num_rows, known, int((step_s - cost.base_s) / row_s))

    def is_for_narrowest(self) -> bool:
        self._num_shared = (self._num_shared + 1) % _SHARED
        return not self._num_shared

    def ending_cost(self) -> int:
        return round(self.learned.cost.row_s / self._token_s()) if self.has_turns else 0

    def _slowed_s(self, load: Load) -> float:
        slowdown = self.goals.slowdown
        if slowdown is None:
            return math.inf
        narrowest = load.narrowest or Decodes(load.num_decodes, load.num_context_tokens)
        alone_s = self._alone.seconds(*narrowest)
        return (slowdown.by_many if load.num_asking > 1 else slowdown.by_one) * alone_s

    def prompt_tokens(self, load: Load) -> int | None:
        least = (
            self._least if self.goals.slowdown is None else min(self._least, self._tokens(load, self._slowed_s(load)))
        )
        return max(1, least, self._tokens(load, self.step_s(load)))

    def _tokens(self, load: Load, step_s: float) -> int:
        """How many tokens of prompts fit a step of `step_s` seconds."""
        token_s = self._token_s() + load.depth * self.learned.cost.pair_s
        return int(self.learned.prompts_within(step_s, load.num_decodes, load.num_context_tokens) / token_s)

    def _token_s(self) -> float:
        """Of a prompt, where none is before it."""
        assumed, token_s = self.learned.assumed, self.learned.cost.token_s
        if self.goals.slowdown is None:
            return max(token_s, _LEAST_OF_MEASURED * assumed.token_s)
        # Rows take less than at the start where others had the cores then, and tokens do, too.
        return max(token_s, assumed.token_s * min(1.0, self._alone.seconds(1, 0) / assumed.decode_s(1, 0)))

    def scored_cost(self) -> int:
        cost = self.learned.cost
        return max(1, round(1 + cost.scored_s / (self._token_s() if self.has_turns else cost.token_s)))

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        lead, cost = self._lead, self.learned.cost
        if lead is None or cost.base_s + cost.token_s * batch.num_tokens < 2 * lead.step_s:
            return 0.0  # a step is over by the time that its length has been looked up
        return max(0.0, _SURE * self.learned.expected_s(batch) - lead.step_s - lead.row_s * len(batch.rows))

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        self.learned.settled(batch, took_s)
