"""The throughput line in the log, at most once in REPORT_S and only while steps settle."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from runtime.metrics.stats import EngineStats
from runtime.scheduler import Scheduler

log = logging.getLogger("oneloop.engine")

REPORT_S = 10.0


class _Counts(NamedTuple):
    prompt: int
    generation: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0


class ThroughputLog:
    def __init__(self, stats: EngineStats, scheduler: Scheduler) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self.restart()

    def restart(self) -> None:
        self._since_s = time.monotonic()
        self._before = self._counts()

    def maybe(self, now: float) -> None:
        elapsed_s = now - self._since_s
        if elapsed_s < REPORT_S:
            return
        scheduler = self._scheduler
        gained = _Counts(*(after - before for after, before in zip(self._counts(), self._before, strict=True)))
        log.info(
            "prompt %.1f tok/s, generation %.1f tok/s, %d running, %d waiting, KV %.0f %%, prefix hits %.0f %%%s",
            gained.prompt / elapsed_s,
            gained.generation / elapsed_s,
            len(scheduler.running),
            len(scheduler.waiting),
            100.0 * scheduler.pool.usage,
            100.0 * scheduler.num_prefix_hits / max(1, scheduler.num_prefix_queries),
            _acceptance(gained),
        )
        self.restart()

    def _counts(self) -> _Counts:
        prompt, generation, drafts = (
            self._stats.prompt_tokens,
            self._stats.generation_tokens,
            self._scheduler.speculation,
        )
        if drafts is None:
            return _Counts(prompt, generation)
        return _Counts(prompt, generation, drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens)


def _acceptance(gained: _Counts) -> str:
    if not gained.drafts:
        return ""
    share = 100.0 * gained.accepted / gained.draft_tokens
    return f", drafts of {gained.draft_tokens / gained.drafts:.1f} tokens accepted {share:.0f} %"
