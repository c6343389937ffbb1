"""Step health: detects a step that takes unusually long, and repeated failures. All steps that end are reported to it.

A step is too slow if it has run `factor` times as long as the slowest recent step of its kind. The kind is the size of a step's
work, in powers of two. For a kind without history, the limit is derived from other kinds, since no step time grows faster than
tokens times context. Reads no clock: times and durations are arguments."""

from __future__ import annotations

from typing import NamedTuple

from runtime.batch import ScheduledBatch

_FORGETS = 0.1  # decay of the slowest time, per faster step, towards that step's time


class HealthLimits(NamedTuple):
    """Limits of step health, in seconds unless stated otherwise.

    `factor`: see the module. `min_s`: no step is too slow before this time. `min_unseen_s`: the same for a kind without
    history, whose kernels may need compilation. `first_s`: the same for the first step. `hopeless_s`: the engine is considered
    dead after one slow step, or only failures, for this time. `num_failures`: consecutive failures that count as failing."""

    factor: float = 10.0
    min_s: float = 5.0
    min_unseen_s: float = 30.0
    first_s: float = 120.0
    hopeless_s: float = 120.0
    num_failures: int = 3


class StepKind(NamedTuple):
    """Size of a step, in powers of two: its tokens, and the context of its longest sequence. `scores`: it has prompt logprobs."""

    tokens: int
    context: int
    scores: bool

    @classmethod
    def of(cls, batch: ScheduledBatch) -> StepKind:
        context = max([row.start + row.num_tokens for row in batch.rows], default=0)
        return cls(batch.num_tokens.bit_length(), context.bit_length(), bool(batch.prompt_logprobs_rows))

    def times_more_than(self, other: StepKind) -> int:
        """Return the maximum ratio between the durations of a step of this kind and a step of kind `other`."""
        more_tokens, more_context = max(0, self.tokens - other.tokens), max(0, self.context - other.context)
        return int(2 ** (more_tokens + more_context))


class Verdict(NamedTuple):
    """Health of the engine's steps. `reason`: the problem, for users, or None. `hopeless`: the engine will not recover."""

    reason: str | None = None
    hopeless: bool = False


class StepHealth:
    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._slowest_s: dict[StepKind, float] = {}  # slowest recent step of each kind
        self._num_failures = 0  # since the last settled step
        self._first_failure_s = 0.0
        self._last_failure_s = 0.0

    def settled(self, batch: ScheduledBatch, duration_s: float) -> None:
        self._num_failures = 0
        kind = StepKind.of(batch)
        slowest_s = self._slowest_s.get(kind, 0.0)
        self._slowest_s[kind] = max(duration_s, slowest_s + _FORGETS * (duration_s - slowest_s))

    def failed(self, now_s: float) -> None:
        """Record that a step could not be launched, or ended with an error."""
        if not self._num_failures:
            self._first_failure_s = now_s
        self._num_failures += 1
        self._last_failure_s = now_s

    @property
    def failing(self) -> bool:
        """True after `num_failures` consecutive failed steps, until a step succeeds."""
        return self._num_failures >= self._limits.num_failures

    def verdict(self, oldest: ScheduledBatch | None, age_s: float) -> Verdict:
        """Return the health of the engine. `oldest`: step that has been running for `age_s` seconds, or None."""
        if oldest is not None and age_s > (limit_s := self.limit_s(oldest)):
            reason = f"a step has been running for {age_s:.0f} s, where {limit_s:.0f} s would be much"
            return Verdict(reason, hopeless=age_s > max(limit_s, self._limits.hopeless_s))
        if self.failing:
            lasting_s = self._last_failure_s - self._first_failure_s
            reason = f"the last {self._num_failures} steps failed"
            return Verdict(reason, hopeless=lasting_s >= self._limits.hopeless_s)
        return Verdict()

    def limit_s(self, batch: ScheduledBatch) -> float:
        """Return the duration in seconds after which a step of the size of `batch` is reported as hung."""
        limits, kind = self._limits, StepKind.of(batch)
        if (slowest_s := self._slowest_s.get(kind)) is not None:
            return max(limits.min_s, limits.factor * slowest_s)
        # The cost of scoring a prompt grows with the vocabulary, so other steps are not comparable.
        comparable = [seen for seen in self._slowest_s if seen.scores or not kind.scores]
        if not comparable:
            return limits.first_s
        most_s = min(self._slowest_s[seen] * kind.times_more_than(seen) for seen in comparable)
        return max(limits.min_unseen_s, limits.factor * most_s)
