"""Step cost: expected time of a step, estimated from its contents and learned from past steps. Does not read a clock.

The time of a step is the sum of its parts. A GPU reads weights while it computes prompts, so these two times a and b are added as
(a^overlap + b^overlap)^(1/overlap). `overlap` 1 is the plain sum, as on a few CPU cores. 1.3 fits 0.6B and 8B models on an H200
within 6 %, from 1 row to 8,192 tokens.

Two kinds of factors correct the cost assumed at start-up. Decodes have a factor per number of rows, learned from steps without
prompts. Prompts have one factor, learned from the time that mixed steps take in addition to their decodes. An error in the cost
of prompts therefore never makes decodes look slower, which would allow longer steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from runtime.batch import ScheduledBatch

SCORED_COST = (
    3  # cost of a prompt token with logprobs, in prompt tokens: 2.2 for SmolLM2 on a CPU, less with more layers
)
_PAIRS_PER_TOKEN = (
    16_384.0  # pairs of prompt token and earlier token that cost a token: 5,200 for 0.6B on an H200, 23,000 for 8B
)
_PAIRS_PER_CONTEXT = 0.15  # cost of a pair on cores, in assumed costs of a context token: 0.13 for SmolLM2
_MEMORY = 16  # steps with prompts whose mean is the factor of prompts
_LATELY = (
    16  # steps of a number of rows, whose lower quartile is their factor: other work on the machine makes steps longer
)
_MOST_ODD = 3.0  # maximum ratio, in both directions, of a step's time to the expected one; other steps are ignored
_MOST_OF_PROMPTS = 2.0  # likewise for the time of the prompts


class TimedSteps(NamedTuple):
    """Times measured at start-up, in seconds. `base_s`: smallest step. `token_s`: each further token of a long prompt. `row_s`:
    each decoding row."""

    base_s: float
    token_s: float
    row_s: float | None = None  # None: not measured

    @property
    def smallest_s(self) -> float:
        """Time of a step with one row, in seconds."""
        return self.base_s + (self.row_s or 0.0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs in seconds. `base_s`: any step. `token_s`: a prompt token. `row_s`: a decoding row. `context_s`: a token of its
    context. `pair_s`: attention of a prompt token to one earlier token. `scored_s`: logprobs of a prompt token. `overlap`: see
    the module."""

    base_s: float
    token_s: float
    row_s: float
    context_s: float
    pair_s: float
    scored_s: float
    overlap: float = 1.3

    @classmethod
    def assumed(cls, timed: TimedSteps, kv_share: float = 0.0) -> StepCost:
        """Return the costs from times measured at start-up. `kv_share`: KV cache bytes per token, divided by the bytes of the
        weights."""
        base_s, token_s, row_s = timed
        context_s = base_s * max(kv_share, 1e-7)
        pair_s, scored_s = token_s / _PAIRS_PER_TOKEN, (SCORED_COST - 1) * token_s
        if row_s is None:
            return cls(base_s, token_s, token_s, context_s, pair_s, scored_s)
        pair_s = max(pair_s, _PAIRS_PER_CONTEXT * context_s)
        return cls(base_s, token_s, row_s, context_s, pair_s, scored_s, overlap=1.0)

    def decode_s(self, num_rows: int, num_context: int) -> float:
        return self.base_s + self.row_s * num_rows + self.context_s * num_context

    def prompts_s(self, contents: _Contents) -> float:
        return (
            self.token_s * contents.num_tokens + self.pair_s * contents.num_pairs + self.scored_s * contents.num_scored
        )


class LearnedCost:
    """StepCost learned from observed steps. `every`: one in `every` steps without prompts is observed."""

    def __init__(self, assumed: StepCost, *, every: int = 1) -> None:
        self.assumed = assumed
        self.most_rows = 0  # most rows of any observed step
        self._every = every
        self._num_decodes = 0  # number of steps without prompts
        self._lately: dict[
            int, deque[float]
        ] = {}  # factors of steps without prompts, by bit length of their number of rows
        self._alone: dict[int, float] = {}  # lower quartile of each
        self._beside: dict[int, float] = {}  # likewise for row counts that only mixed steps had
        self._prompts = 1.0
        self._num_prompts = 0  # number of steps with prompts

    @property
    def cost(self) -> StepCost:
        """Learned costs, with the factor of decodes for a step with a single decode."""
        one, decode, prompt = self.assumed, self.alone_factor(1), self._prompts
        return replace(
            one, base_s=one.base_s * decode, row_s=one.row_s * decode, context_s=one.context_s * decode,
            token_s=one.token_s * prompt, pair_s=one.pair_s * prompt, scored_s=one.scored_s * prompt,
        )  # fmt: skip

    def alone_factor(self, num_rows: int) -> float:
        """Return the learned factor of steps without prompts that have `num_rows` rows. If none was observed, return the factor
        of the next smaller observed number of rows, otherwise of the smallest."""
        known, size = self._alone, num_rows.bit_length()
        if not known:
            return 1.0
        return known[max((each for each in known if each <= size), default=min(known))]

    def alone_s(self, num_rows: int, num_context: int) -> float:
        """Return the expected time of a step without prompts, in seconds, learned from steps without prompts only."""
        return self.alone_factor(num_rows) * self.assumed.decode_s(num_rows, num_context)

    def decode_s(self, num_rows: int, num_context: int) -> float:
        """Return the expected time of a step without prompts, in seconds, learned from all steps."""
        return self._decode_factor(num_rows) * self.assumed.decode_s(num_rows, num_context)

    def _decode_factor(self, num_rows: int) -> float:
        return self._beside.get(num_rows.bit_length()) or self.alone_factor(num_rows)

    def prompts_within(self, step_s: float, num_rows: int, num_context: int) -> float:
        """Return the time that prompts may take, if computed alone, so that a step with these decodes stays within `step_s`."""
        base_s = self._decode_factor(num_rows) * self.assumed.base_s
        return _difference(step_s - (self.decode_s(num_rows, num_context) - base_s), base_s, self.assumed.overlap)

    def expected_s(self, batch: ScheduledBatch) -> float:
        return self._expected_s(_contents(batch))

    def _expected_s(self, contents: _Contents) -> float:
        decode_s = self.decode_s(contents.num_rows, contents.num_context)
        if not contents.num_tokens:
            return decode_s
        base_s = self._decode_factor(contents.num_rows) * self.assumed.base_s
        return decode_s - base_s + _sum(base_s, self._prompts * self.assumed.prompts_s(contents), self.assumed.overlap)

    def settled(self, batch: ScheduledBatch, took_s: float) -> None:
        """Learn from the step of `batch`, which took `took_s` seconds, unless it waited for masks."""
        num_drafts = sum([len(row.draft_ids) for row in batch.rows]) if batch.num_tokens > len(batch.rows) else 0
        if batch.num_tokens == len(batch.rows) + num_drafts and not batch.prompt_logprobs_rows:
            self._num_decodes += 1
            if self._num_decodes % self._every != 1 % self._every:
                return
        if any(row.masked for row in batch.rows):
            return
        contents = _contents(batch)
        num_rows, size = contents.num_rows, contents.num_rows.bit_length()
        self.most_rows = max(self.most_rows, num_rows)
        expected_s = self._expected_s(contents)
        if not expected_s or not (num_rows or contents.num_tokens):
            return
        took_s = min(max(took_s, expected_s / _MOST_ODD), expected_s * _MOST_ODD)
        factor = self._decode_factor(num_rows) * took_s / expected_s
        if not contents.num_tokens:
            self._beside.pop(size, None)
            lately = self._lately.setdefault(size, deque(maxlen=_LATELY))
            lately.append(factor)
            self._alone[size] = sorted(lately)[len(lately) // 4]
        elif self._is_about_decodes(contents, expected_s):
            self._beside[size] = factor
        else:
            self._learn_prompts(contents, self.prompts_within(took_s, num_rows, contents.num_context))

    def _is_about_decodes(self, contents: _Contents, expected_s: float) -> bool:
        """Return True if decodes probably caused the unexpected time of a step with prompts: decodes take most of its time, and
        no step with as many rows and without prompts has been observed."""
        if contents.num_scored or contents.num_rows.bit_length() in self._alone:
            return False
        return 2 * self.decode_s(contents.num_rows, contents.num_context) > expected_s

    def _learn_prompts(self, contents: _Contents, took_s: float) -> None:
        assumed_s = self.assumed.prompts_s(contents)
        if assumed_s:
            least, most = self._prompts / _MOST_OF_PROMPTS, self._prompts * _MOST_OF_PROMPTS
            self._num_prompts = min(self._num_prompts + 1, _MEMORY)
            self._prompts += (min(max(took_s / assumed_s, least), most) - self._prompts) / self._num_prompts


class _Contents(NamedTuple):
    """Contents of a step. `num_rows`: rows that decode or end a prompt. `num_context`: context tokens of decodes. `num_tokens`:
    prompt tokens. `num_pairs`: their attention pairs. `num_scored`: prompt tokens with logprobs."""

    num_rows: int
    num_context: int
    num_tokens: int = 0
    num_pairs: float = 0.0
    num_scored: int = 0


def _contents(batch: ScheduledBatch) -> _Contents:
    if batch.num_tokens == len(batch.rows) and not batch.prompt_logprobs_rows:  # the usual case, so it is fast
        return _Contents(len(batch.rows), sum([row.start for row in batch.rows]))
    num_rows = num_context = num_tokens = num_scored = 0
    num_pairs = 0.0
    for row in batch.rows:
        if row.num_tokens == 1 + len(row.draft_ids) and row.prompt_logprobs is None:
            num_rows += row.num_tokens  # a draft token costs about a row
            num_context += row.start
        else:
            num_tokens += row.num_tokens
            num_pairs += row.num_tokens * (row.start + row.num_tokens / 2)
            num_rows += row.work is not None  # the end of a prompt costs a decode
            if row.prompt_logprobs is not None:
                num_scored += row.num_tokens
    return _Contents(num_rows, num_context, num_tokens, num_pairs, num_scored)


def _difference(sum_s: float, one_s: float, overlap: float) -> float:
    """Return the time x for which `_sum(x, one_s, overlap)` is `sum_s`; 0 if `one_s` exceeds `sum_s`."""
    return (sum_s**overlap - one_s**overlap) ** (1 / overlap) if sum_s > one_s else 0.0


def _sum(one_s: float, other_s: float, overlap: float) -> float:
    """Return the total time of two parts of a step that partly overlap."""
    return float((one_s**overlap + other_s**overlap) ** (1 / overlap))
