"""The throughput line in the log, at most once in REPORT_S and only while steps settle."""

from __future__ import annotations

import logging
import time

from runtime.metrics.stats import EngineStats
from runtime.scheduler import Scheduler

log = logging.getLogger("oneloop.engine")

REPORT_S = 10.0


class ThroughputLog:
    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.restart()

    def restart(self) -> None:
        self._since_s = time.monotonic()
        self._prompt, self._generation = self._stats.prompt_tokens, self._stats.generation_tokens

    def maybe(self, now: float, scheduler: Scheduler) -> None:
        elapsed_s = now - self._since_s
        if elapsed_s < REPORT_S:
            return
        log.info(
            "prompt %.1f tok/s, generation %.1f tok/s, %d running, %d waiting, KV %.0f %%, prefix hits %.0f %%",
            (self._stats.prompt_tokens - self._prompt) / elapsed_s,
            (self._stats.generation_tokens - self._generation) / elapsed_s,
            len(scheduler.running),
            len(scheduler.waiting),
            100.0 * (1.0 - scheduler.pool.num_free / scheduler.pool.num_blocks),
            100.0 * scheduler.num_prefix_hits / max(1, scheduler.num_prefix_queries),
        )
        self.restart()
