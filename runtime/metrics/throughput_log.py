"""Throughput line in the log, written at most once per REPORT_S seconds and only while steps complete."""

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
            100.0 * scheduler.blocks.pool.usage,
            100.0 * scheduler.blocks.num_prefix_hits / max(1, scheduler.blocks.num_prefix_queries),
            "".join([feature.progress() for feature in scheduler.features]),
        )
        self.restart()

    def _counts(self) -> _Counts:
        return _Counts(self._stats.prompt_tokens, self._stats.generation_tokens)
