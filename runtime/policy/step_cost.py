"""Step cost: how long a step takes, from what is in it; and how that is learned from the steps that were. No clock of its own.

A step's time is a sum over what is in it, each with a cost; but a GPU reads the weights while it computes what prompts have, so
of these two the sum is one of powers (`overlap`: 1 is one after the other, as on a few cores; 1.3 fits 0.6B and 8B on an H200 from
1 row to 8,192 tokens within 6 %). What it takes without prompts (the weights are read once, then each row and each token of its
context) and what prompts add (each token, each pair of a token and one before it, each token that is scored) are learned apart:
steps without prompts, of which there are many, say nothing of the others and make nobody forget them. What is learned of a cost is
a factor on what was assumed at the start, by least squares of relative errors, in which late steps count more than early ones and
what was assumed counts as a few: so a cost of which steps say nothing stays what it was, and one odd step moves little.

Errors of what a mixed step is expected to take are shared out among costs as well as can be; they must not come back as more time
for such a step. So what rows take that have steps for themselves is kept beside these costs, by their number (`StepsAlone`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.batch import ScheduledBatch

# Of a prompt's token whose logits are wanted, in tokens: 2.2 for SmolLM2 on a CPU, less with more layers.
SCORED_COST = 3.0
# Of a token and one before it, which take as long as a token: 5,200 for 0.6B on an H200, 23,000 for 8B.
_PAIRS_PER_TOKEN = 16_384.0
_PAIRS_PER_CONTEXT = 0.6  # on cores, of what a decode takes for a token before it: 0.63 for SmolLM2
_KEPT = 0.99  # of what is known, from step to step
_ASSUMED = 0.05  # what the assumptions count, in steps
_MOST = 20.0  # by which what is learned differs at most from what was assumed, either way
_OFF = 0.1  # of what was expected: less is no reason to doubt what decodes cost, where there are prompts, too
_EVERY = 8  # of steps without prompts that are alike, one is looked at, where nobody asks what they take alone
_LATELY = 16  # steps of so many rows alone, of which three in four take longer than these are said to
_ODD = 3.0  # a step that takes so many times what was expected, or that part of it, counts as one at this border


class TimedSteps(NamedTuple):
    """What was timed at the start, seconds: a step with next to nothing in it, what each token of a long prompt adds, and each row
    that decodes, where that was timed, too."""

    base_s: float
    token_s: float
    row_s: float | None = None

    @property
    def smallest_s(self) -> float:
        """Of a step with one row."""
        return self.base_s + (self.row_s or 0.0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds. `base_s`: of a step, whatever is in it. `row_s`, `context_s`: of each row that decodes, and each token before its
    own. `token_s`, `pair_s`, `scored_s`: of each token of a prompt, each pair of one and one before it, and what scoring it
    adds. `overlap`: of computing prompts and the rest."""

    base_s: float
    token_s: float
    row_s: float
    context_s: float
    pair_s: float
    scored_s: float
    overlap: float = 1.3

    @classmethod
    def assumed(cls, timed: TimedSteps, kv_share: float = 0.0) -> StepCost:
        """`kv_share`: bytes that the KV cache has for a token, in those of the weights: they come through the same memory. Where a
        row was timed, each costs what it costs alone, and so does whatever a step has."""
        base_s, token_s, row_s = timed
        context_s = base_s * max(kv_share, 1e-7)
        pair_s, scored_s = token_s / _PAIRS_PER_TOKEN, (SCORED_COST - 1) * token_s
        if row_s is None:
            return cls(base_s, token_s, token_s, context_s, pair_s, scored_s)
        pair_s = max(pair_s, _PAIRS_PER_CONTEXT * context_s)
        return cls(base_s, token_s, row_s, context_s, pair_s, scored_s, overlap=1.0)

    def decode_s(self, num_rows: int, num_context: int) -> float:
        """What a step takes without prompts."""
        return sum(self.decode_parts(num_rows, num_context))

    def decode_parts(self, num_rows: int, num_context: float) -> tuple[float, float, float]:
        """Of that what any step takes, what the rows add and what the tokens before theirs do."""
        return self.base_s, self.row_s * num_rows, self.context_s * num_context


class _Factors:
    """Factors on the costs of a few things, of which a step has each some seconds' worth."""

    def __init__(self, num: int) -> None:
        self.values = [1.0] * num
        self._squares = [[0.0] * num for _ in range(num)]
        self._sums = [0.0] * num

    def expected(self, assumed_s: Sequence[float]) -> float:
        """What things take together that were assumed to take so much each."""
        return sum(factor * each for factor, each in zip(self.values, assumed_s, strict=True))

    def learn(self, assumed_s: Sequence[float], took_s: float) -> None:
        """`assumed_s`: what each thing in a step was assumed to take; together they took `took_s`."""
        expected_s = self.expected(assumed_s)
        if not expected_s:
            return  # the step contained none of these things
        took_s = min(max(took_s, expected_s / _ODD), expected_s * _ODD)
        # Relative to what was expected: relative to what they took, steps that scatter would seem shorter than they are.
        shares, ratio = [each / expected_s for each in assumed_s], took_s / expected_s
        for i, share in enumerate(shares):
            self._sums[i] = _KEPT * self._sums[i] + share * ratio
            line = self._squares[i]
            for j, other in enumerate(shares):
                line[j] = _KEPT * line[j] + share * other
        self.values = [min(max(value, 1 / _MOST), _MOST) for value in self._solved()]

    def _solved(self) -> list[float]:
        """By elimination: the matrix has what was assumed on its diagonal, so it can be."""
        num = len(self._sums)
        lines = [
            [*(value + (_ASSUMED if i == j else 0.0) for j, value in enumerate(line)), self._sums[i] + _ASSUMED]
            for i, line in enumerate(self._squares)
        ]
        for i in range(num):
            for j in range(i + 1, num):
                factor = lines[j][i] / lines[i][i]
                lines[j] = [low - factor * high for low, high in zip(lines[j], lines[i], strict=True)]
        values = [0.0] * num
        for i in reversed(range(num)):
            rest = sum(lines[i][j] * values[j] for j in range(i + 1, num))
            values[i] = (lines[i][num] - rest) / lines[i][i]
        return values


class StepsAlone:
    """How long so many rows lately took that decode with nothing beside them: the lower quartile of some steps, since whatever else
    a machine does makes them longer, and most of all what is to be beside them: its texts become tokens at first."""

    def __init__(self, assumed: StepCost) -> None:
        self._assumed = assumed
        # By the number of rows, in times what was assumed with the same context: lately, and what is known, with the last context.
        self._lately: dict[int, deque[float]] = {}
        self._known: dict[int, tuple[float, int]] = {}

    def settled(self, num_rows: int, num_context: int, took_s: float) -> None:
        lately = self._lately.setdefault(num_rows, deque(maxlen=_LATELY))
        lately.append(took_s / self._assumed.decode_s(num_rows, num_context))
        self._known[num_rows] = sorted(lately)[len(lately) // 4], num_context

    def seconds(self, num_rows: int, num_context: int) -> float:
        """Of a step with these. Where no such step was seen, what was assumed says how much longer or shorter it is than one with
        fewer rows, or else with more."""
        expected_s = self._assumed.decode_s(num_rows, num_context)
        if not self._known:
            return expected_s
        like = max((num for num in self._known if num <= num_rows), default=min(self._known))
        return self._known[like][0] * expected_s

    def ends(self) -> list[tuple[int, int, float]]:
        """The fewest rows that were seen, the tokens before theirs, and seconds; and of the most."""
        ends = [(num, self._known[num][1]) for num in (min(self._known), max(self._known))]
        return [(num, context, self.seconds(num, context)) for num, context in ends]


class LearnedCost:
    """A StepCost that follows the steps that it is shown."""

    def __init__(self, assumed: StepCost, alone: StepsAlone | None = None) -> None:
        """`alone`: where what rows take that have steps for themselves is wanted, too; then each of these steps is looked at."""
        self.assumed = assumed
        self._alone = alone
        self._decode, self._prompt = _Factors(3), _Factors(3)
        self._num_decodes = self._last_rows = 0
        self.most_rows = 0  # in any step that was looked at

    @property
    def cost(self) -> StepCost:
        one, decode, prompt = self.assumed, self._decode.values, self._prompt.values
        return StepCost(
            one.base_s * decode[0], one.token_s * prompt[0], one.row_s * decode[1], one.context_s * decode[2],
            one.pair_s * prompt[1], one.scored_s * prompt[2], one.overlap,
        )  # fmt: skip

    def prompts_within(self, step_s: float, num_rows: int, num_context: int) -> float:
        """Seconds' worth of prompts that keep a step with so many decodes within `step_s`."""
        base_s = self._decode.values[0] * self.assumed.base_s
        left_s = step_s - (self.decode_s(num_rows, num_context) - base_s)
        return _difference(left_s, base_s, self.assumed.overlap)

    def decode_s(self, num_rows: int, num_context: int) -> float:
        """What a step takes without prompts."""
        return self._decode.expected(self.assumed.decode_parts(num_rows, num_context))

    def expected_s(self, batch: ScheduledBatch) -> float:
        """What the step of `batch` takes."""
        one, (num_rows, num_context, num_tokens, num_pairs, num_scored) = self.assumed, _contents(batch)
        decode_s = self.decode_s(num_rows, num_context)
        if not num_tokens:
            return decode_s
        return self._with_prompts(
            decode_s, [one.token_s * num_tokens, one.pair_s * num_pairs, one.scored_s * num_scored]
        )

    def _with_prompts(self, decode_s: float, prompts_s: Sequence[float]) -> float:
        """What a step takes that would take `decode_s` without prompts. `prompts_s`: as was assumed of each thing in them."""
        base_s = self._decode.values[0] * self.assumed.base_s
        return decode_s - base_s + _sum(base_s, self._prompt.expected(prompts_s), self.assumed.overlap)

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        """A step with `batch` took `took_s`. Of steps without prompts one in some is looked at, and those of a quarter more or
        fewer rows than the last of these; and none that waits for masks."""
        num_drafts = sum([len(row.draft_ids) for row in batch.rows]) if batch.num_tokens > len(batch.rows) else 0
        only_decodes = batch.num_tokens == len(batch.rows) + num_drafts and not batch.prompt_logprobs_rows
        if only_decodes:
            self._num_decodes += 1
            alike = 3 * self._last_rows < 4 * len(batch.rows) < 5 * self._last_rows
            if self._alone is None and alike and self._num_decodes % _EVERY != 1:
                return
            self._last_rows = len(batch.rows)
        if any(row.masked for row in batch.rows):
            return
        num_rows, num_context, num_tokens, num_pairs, num_scored = _contents(batch)
        one = self.assumed
        self.most_rows = max(self.most_rows, num_rows)
        if only_decodes:
            if num_rows:
                self._settled_alone(num_rows, num_context, took_s)
            return
        prompts = [one.token_s * num_tokens, one.pair_s * num_pairs, one.scored_s * num_scored]
        decode_s = self.decode_s(num_rows, num_context)
        expected_s = self._with_prompts(decode_s, prompts)
        prompts_s = max(self.prompts_within(took_s, num_rows, num_context), took_s / 100)
        is_wider = num_rows > 2 * self._last_rows  # than any without prompts lately, which say what fewer take
        if is_wider and 2 * decode_s > expected_s and abs(took_s - expected_s) > _OFF * expected_s:
            # Most of it is decodes: as likely as not what was wrong is what they cost.
            self._decode.learn(one.decode_parts(num_rows, num_context), decode_s * took_s / expected_s)
        self._prompt.learn(prompts, prompts_s)

    def _settled_alone(self, num_rows: int, num_context: int, took_s: float) -> None:
        """Many rows make nobody forget what few take, nor few what many do: what a row adds follows from both."""
        self._decode.learn(self.assumed.decode_parts(num_rows, num_context), took_s)
        if self._alone is None:
            return
        self._alone.settled(num_rows, num_context, took_s)
        for num, context, known_s in self._alone.ends():
            if num != num_rows:
                self._decode.learn(self.assumed.decode_parts(num, context), known_s)


def _contents(batch: ScheduledBatch) -> tuple[int, int, int, float, int]:
    """Rows that decode or end a prompt, tokens before the former; tokens of prompts, pairs of one and one before it, and those of
    them that are scored."""
    if batch.num_tokens == len(batch.rows) and not batch.prompt_logprobs_rows:  # as most, so quickly
        return len(batch.rows), sum([row.start for row in batch.rows]), 0, 0.0, 0
    num_rows = num_context = num_tokens = num_scored = 0
    num_pairs = 0.0
    for row in batch.rows:
        if row.num_tokens == 1 + len(row.draft_ids) and row.prompt_logprobs is None:
            num_rows += row.num_tokens  # a draft takes about what a row does
            num_context += row.start
        else:
            num_tokens += row.num_tokens
            num_pairs += row.num_tokens * (row.start + row.num_tokens / 2)
            num_rows += row.work is not None  # its end costs what a decode does
            if row.prompt_logprobs is not None:
                num_scored += row.num_tokens
    return num_rows, num_context, num_tokens, num_pairs, num_scored


def _difference(sum_s: float, one_s: float, overlap: float) -> float:
    """What makes `sum_s` of `one_s`, where they go on beside each other; 0 where nothing is left."""
    return (sum_s**overlap - one_s**overlap) ** (1 / overlap) if sum_s > one_s else 0.0


def _sum(one_s: float, other_s: float, overlap: float) -> float:
    """What two take that go on beside each other."""
    return float((one_s**overlap + other_s**overlap) ** (1 / overlap))
