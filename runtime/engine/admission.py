"""Admission: accepts requests, or rejects them with a retry time.

The queue is limited in requests and in tokens. If the queue is full, a caller with less than an equal share of it is still
accepted, up to twice the limit in total. No caller can therefore lock out others. Each caller also has limits of running and
waiting requests, and of tokens per minute. A rejected `submit` raises Busy with a retry time in seconds, estimated from the
recent rate of request starts. The clock is passed as an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from runtime.api import CallerLimit, QueueFull, Request
from runtime.sequence import Sequence

HALF_LIFE_S = 15.0  # half-life of the measured start rate
MAX_RETRY_S = 600.0
MAX_BUCKETS = 4096  # callers with a token bucket; beyond, those with full buckets are forgotten


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of admission; None means no limit. A request that waits longer than `max_queue_time_s` seconds without starting is
    ended."""

    max_queue: int = 256
    max_queued_tokens: int | None = None
    max_num_seqs_per_key: int | None = None
    max_tokens_per_minute_per_key: int | None = None
    max_queue_time_s: float | None = None


class StartRate:
    """Recent rate of request starts, measured while requests wait."""

    def __init__(self) -> None:
        self._num = 0.0
        self._span_s = 0.0  # total time in which these started
        self._since_s: float | None = None  # start of the current wait; None while no request waits

    def waiting(self, now: float) -> None:
        """Start measuring, because a request waits. Has no effect if a measurement is running."""
        if self._since_s is None:
            self._since_s = now

    def started(self, num: int, now: float, *, others_wait: bool) -> None:
        if self._since_s is not None:
            elapsed_s = now - self._since_s
            kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._num, self._span_s = kept * self._num + num, kept * self._span_s + elapsed_s
        self._since_s = now if others_wait else None

    def seconds_for(self, num: int, now: float) -> float | None:
        """Return the estimated number of seconds until `num` requests have started; None if unknown."""
        span_s = self._span_s + (0.0 if self._since_s is None else now - self._since_s)
        return num * span_s / self._num if self._num else None


class TokenBucket:
    """Token bucket of a caller: contains at most the tokens of one minute, and is refilled continuously.

    The level may become negative, because output lengths are unknown in advance. New requests are rejected below 1 token."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_s, self._most = per_minute / 60, float(per_minute)
        self._level, self._seen_s = self._most, now

    def take(self, num: int, now: float) -> None:
        self._refill(now)
        self._level -= num

    def seconds_until_some(self, now: float) -> float:
        """Return the time until the bucket contains a token, in seconds; 0 if it contains one now."""
        self._refill(now)
        return 0.0 if self._level >= 1 else (1 - self._level) / self._per_s

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._level >= self._most

    def _refill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._seen_s) * self._per_s)
        self._seen_s = now


class Callers:
    """State of callers, shared by engines. `open`: number of sequences of each caller that have not ended."""

    def __init__(self) -> None:
        self.open: Counter[bytes | None] = Counter()
        self._buckets: dict[bytes | None, TokenBucket] = {}

    def bucket(self, caller: bytes | None, per_minute: int, now: float) -> TokenBucket:
        if caller not in self._buckets:
            if len(self._buckets) >= MAX_BUCKETS:
                self._buckets = {who: bucket for who, bucket in self._buckets.items() if not bucket.is_full(now)}
            self._buckets[caller] = TokenBucket(per_minute, now)
        return self._buckets[caller]


class Admission:
    """Admission control of one engine. The engine calls it on the event loop when sequences arrive, start, grow or end.
    `callers`: state shared with other engines."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float], callers: Callers | None = None) -> None:
        self.limits = limits
        self._clock = clock
        self._rate = StartRate()
        self._callers = callers or Callers()

    def check(self, requests: Several[Request], waiting: Several[Sequence], num_free_rows: int) -> None:
        """Raise Busy if `requests`, all of one caller, may not join the queue `waiting`. The first `num_free_rows` sequences of
        `waiting` start at once and are not counted."""
        self.check_caller(requests[0].caller, waiting, num_free_rows, num_new=len(requests))
        if self.limits.max_queued_tokens is not None and waiting:
            self._check_tokens(requests, waiting, self.limits.max_queued_tokens)

    def check_caller(
        self, caller: bytes | None, waiting: Several[Sequence], num_free_rows: int, *, num_new: int = 1
    ) -> None:
        """Raise Busy if a limit that does not depend on prompts is exceeded. Call this before reading the prompts."""
        limits = self.limits
        num_waiting = max(0, len(waiting) - num_free_rows)
        if num_waiting >= limits.max_queue:
            own, num_callers = _share(waiting, caller, lambda sequence: 1)
            if own >= max(1, limits.max_queue // num_callers) or num_waiting >= 2 * limits.max_queue:
                raise QueueFull(num_waiting, limits.max_queue, retry_after_s=self.retry_after_s(num_waiting))
        if limits.max_num_seqs_per_key is not None:
            num_open = self._callers.open[caller]
            if num_open + num_new > limits.max_num_seqs_per_key:
                raise CallerLimit(
                    f"{num_open} sequences of this client run or wait; the limit is {limits.max_num_seqs_per_key}",
                    "max_num_seqs_per_key", self.retry_after_s(1),
                )  # fmt: skip
        if limits.max_tokens_per_minute_per_key is not None:
            seconds = self._bucket(caller, limits.max_tokens_per_minute_per_key).seconds_until_some(self._clock())
            if seconds:
                raise CallerLimit(
                    f"this client has used its {limits.max_tokens_per_minute_per_key} tokens per minute",
                    "max_tokens_per_minute_per_key", seconds,
                )  # fmt: skip

    def _check_tokens(self, requests: Several[Request], waiting: Several[Sequence], limit: int) -> None:
        prompts = {id(sequence.prompt_ids): sequence.num_prompt_tokens for sequence in waiting}
        queued = sum(prompts.values())  # requests with the same prompt compute it once
        new = sum({id(request.prompt_ids): len(request.prompt_ids) for request in requests}.values())
        if queued + new > limit:
            own, num_callers = _share(waiting, requests[0].caller, lambda sequence: sequence.num_prompt_tokens)
            if own + new > limit // num_callers or queued + new > 2 * limit:
                retry_after_s = self.retry_after_s(len(waiting))
                raise QueueFull(queued, limit, unit="prompt tokens", retry_after_s=retry_after_s)

    def admitted(self, requests: Several[Request], *, others_wait: bool) -> None:
        caller = requests[0].caller
        self._callers.open[caller] += len(requests)
        if (per_minute := self.limits.max_tokens_per_minute_per_key) is not None:
            prompts = {id(request.prompt_ids): len(request.prompt_ids) for request in requests}
            self._bucket(caller, per_minute).take(sum(prompts.values()), self._clock())
        if others_wait:
            self._rate.waiting(self._clock())

    def started(self, num: int, *, others_wait: bool) -> None:
        """Record that `num` sequences were added to a step for the first time."""
        self._rate.started(num, self._clock(), others_wait=others_wait)

    @property
    def counts_tokens(self) -> bool:
        """True if the engine must call `gained` with generated tokens."""
        return self.limits.max_tokens_per_minute_per_key is not None

    def gained(self, caller: bytes | None, num_tokens: int) -> None:
        if (per_minute := self.limits.max_tokens_per_minute_per_key) is not None:
            self._bucket(caller, per_minute).take(num_tokens, self._clock())

    def ended(self, caller: bytes | None) -> None:
        self._callers.open[caller] -= 1
        if not self._callers.open[caller]:
            del self._callers.open[caller]

    def retry_after_s(self, num_ahead: int) -> float:
        """Return the estimated seconds until `num_ahead` waiting requests have started, between 1 and MAX_RETRY_S."""
        return min(max(1.0, self._rate.seconds_for(num_ahead, self._clock()) or 0.0), MAX_RETRY_S)

    def _bucket(self, caller: bytes | None, per_minute: int) -> TokenBucket:
        return self._callers.bucket(caller, per_minute, self._clock())


def _share(
    waiting: Several[Sequence], caller: bytes | None, cost: Callable[[Sequence], int]
) -> tuple[int, int]:  # fmt: skip
    """Return the summed `cost` of the waiting sequences of `caller`, and the number of callers, including `caller`."""
    own = sum(cost(sequence) for sequence in waiting if sequence.request.caller == caller)
    return own, len({sequence.request.caller for sequence in waiting} | {caller})
