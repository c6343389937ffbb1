"""EngineMeter: updates an engine's counters and histograms and writes its log lines.

Times of a sequence are stored on the sequence, so they are freed with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from runtime.api import Activity, Busy, Finished, FinishReason, Metric, ModelInfo, StepRecord
from runtime.batch import ScheduledBatch
from runtime.metrics.history import History
from runtime.metrics.loop_lag import LoopLag
from runtime.metrics.stats import EngineStats, counter, gauge
from runtime.metrics.throughput_log import ThroughputLog
from runtime.policy.step_budget import StepBudget, TimedBudget
from runtime.scheduler import Scheduler
from runtime.scheduling.settling import Settled
from runtime.sequence import Sequence
from runtime.step import Step

log = logging.getLogger("oneloop.engine")


class EngineMeter:
    """Counter of an engine's events. Call it on the event loop."""

    def __init__(self, model: ModelInfo, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._stats = EngineStats(model.max_model_len)
        self._lag = LoopLag(self._stats.loop_lag.observe)
        self._throughput = ThroughputLog(self._stats, scheduler)
        self._history = History()
        self._cache_facts = (
            ("block_size", str(model.kv_block_size)),
            ("num_gpu_blocks", str(model.num_kv_blocks)),  # name of vLLM, for any device
            ("enable_prefix_caching", str(scheduler.blocks.cache.enabled)),
        )

    # --- engine ---------------------------------------------------------------------------------------------------

    def busy(self) -> None:
        """Start the meter's timers, because work has arrived after an idle time."""
        self._throughput.restart()
        self._lag.start()

    def idle(self) -> None:
        """Stop the meter's timers, because there is no work or the engine has closed."""
        self._lag.stop()

    def submitted(self, num_requests: int) -> None:
        self._stats.request_n.observe(num_requests)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Busy as busy:
            self._stats.admission_rejections[busy.reason] += 1
            raise

    # --- steps ----------------------------------------------------------------------------------------------------

    def launched(self, batch: ScheduledBatch, launched_s: float) -> int:
        """Count a launched step. Return the number of its sequences that have never been in a step before."""
        stats, scheduler, num_started = self._stats, self._scheduler, 0
        stats.iteration_tokens.observe(batch.num_tokens)
        stats.batch_size.observe(len(batch.rows))
        if batch.num_preempted:
            log.warning(
                "%d requests preempted for lack of KV blocks (%d running, %d waiting): raise --kv-cache-memory",
                batch.num_preempted, len(scheduler.running), len(scheduler.waiting),
            )  # fmt: skip
            self._note_preempted(launched_s)
        if batch.decodes_only:
            return 0
        has_chunks = batch.num_tokens > len(batch.rows)
        for row in batch.rows:
            # The first row of a sequence has a binding.
            if row.binding is not None or (has_chunks and row.num_tokens > 1 + len(row.draft_ids)):
                sequence = scheduler.sequences.find(row.number)
                if sequence is None or sequence.request.is_probe:
                    continue
                if sequence.first_scheduled_s is None:
                    sequence.first_scheduled_s = launched_s
                    stats.queue_time.observe(launched_s - sequence.request.arrival_s)
                    num_started += 1
                elif row.binding is not None:
                    self._history.note(sequence, "resumed", launched_s)
                self._history.note(sequence, "chunk", launched_s, row.num_tokens)
        return num_started

    def _note_preempted(self, now: float) -> None:
        for sequence in self._scheduler.waiting:
            if sequence.num_preemptions > sum(kind == "preempted" for kind, _, _ in sequence.events):
                self._history.note(sequence, "preempted", now)

    def deferred(self, sampling: ScheduledBatch, now: float) -> None:
        """Record that the masks of the rows of `sampling` were late."""
        for row in sampling.rows:
            if (sequence := self._scheduler.sequences.find(row.number)) is not None:
                self._history.note(sequence, "deferred", now)

    def settled(self, step: Step, began_s: float, now: float) -> None:
        """Count a completed step. `began_s`: its launch or the end of the previous step, whichever is later."""
        self._stats.step_time.observe(now - began_s)
        if step.launched_s < began_s and (idle_s := step.idle_before_s()) is not None:
            self._stats.gpu_idle_gap.observe(idle_s)
        self._history.settled(step, now)

    def report(self, now: float) -> None:
        """Log the throughput line if it is due. `now`: current time, in seconds."""
        self._throughput.maybe(now)

    # --- sequences ------------------------------------------------------------------------------------------------

    def gained(self, settled: Iterable[Settled], now: float) -> None:
        """Count the tokens that a step generated. Sequences that only score or pool their prompt generate none."""
        stats = self._stats
        waited: dict[float, int] = {}  # tokens by the time of the previous token: most rows of a step share it
        for sequence, token_ids, finish, _, _ in settled:
            num_tokens = len(token_ids)
            if sequence.request.is_probe or not (num_tokens or finish is not FinishReason.ERROR):
                continue
            stats.generation_tokens += num_tokens
            last_s = sequence.last_token_s
            sequence.last_token_s = now
            if last_s is None:
                self._prompt_computed(sequence, now)
                if num_tokens:
                    sequence.first_token_s = now
                    stats.time_to_first_token.observe(now - sequence.request.arrival_s)
            elif num_tokens == 1:
                waited[last_s] = waited.get(last_s, 0) + 1
            elif num_tokens:  # tokens of one step have waited equally long
                stats.inter_token_latency.observe((now - last_s) / num_tokens, num_tokens)
        for last_s, times in waited.items():
            stats.inter_token_latency.observe(now - last_s, times)

    def finished(self, sequence: Sequence) -> Finished | None:
        """Count a sequence that has ended. Return the request with its record, or None for a probe."""
        if sequence.request.is_probe:
            return None
        stats, now = self._stats, time.monotonic()
        assert sequence.finish is not None
        record = self._history.finished(sequence, now)
        stats.finished[sequence.finish] += 1
        stats.e2e_latency.observe(now - sequence.request.arrival_s)
        stats.request_num_preemptions.observe(sequence.num_preemptions)
        stats.request_prompt_tokens.observe(sequence.num_prompt_tokens)
        stats.request_generation_tokens.observe(sequence.num_output_tokens)
        stats.request_max_tokens.observe(sequence.sampling.max_tokens)
        if sequence.first_scheduled_s is not None:
            stats.inference_time.observe(now - sequence.first_scheduled_s)
        if sequence.first_token_s is not None:
            decode_s = now - sequence.first_token_s
            stats.decode_time.observe(decode_s)
            if sequence.num_output_tokens > 1:
                stats.time_per_output_token.observe(decode_s / (sequence.num_output_tokens - 1))
        return Finished(sequence.request, record, sequence.output_ids)

    def delivered(self, sequence: Sequence, held_s: float) -> None:
        """Record that the reader of `sequence` has read its last output. `held_s`: seconds that outputs waited for the reader."""
        self._history.delivered(sequence, time.monotonic(), held_s)

    def _prompt_computed(self, sequence: Sequence, now: float) -> None:
        stats = self._stats
        stats.prompt_tokens += sequence.num_prompt_tokens
        stats.prompt_tokens_cached += sequence.num_cached_tokens
        stats.request_computed_tokens.observe(sequence.num_prompt_tokens - sequence.num_cached_tokens)
        if sequence.first_scheduled_s is not None:
            stats.prefill_time.observe(now - sequence.first_scheduled_s)

    # --- reports --------------------------------------------------------------------------------------------------

    def activity(
        self, live: Iterable[Sequence], now: float, after_step: int, after_request: int, num_cells: int
    ) -> Activity:
        """Return the recent activity, see `EngineClient.activity`. `live`: sequences that have not ended."""
        return self._history.activity(self._scheduler, live, now, after_step, after_request, num_cells)

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        return self._history.num_steps

    def steps(self, after: int) -> list[StepRecord]:
        return self._history.steps(after)

    def metrics(self) -> list[Metric]:
        scheduler = self._scheduler
        return [
            gauge("num_requests_running", "Requests that are running.", len(scheduler.running)),
            gauge("num_requests_waiting", "Requests that are waiting to be scheduled.", len(scheduler.waiting)),
            gauge("event_loop_tasks", "Tasks on the event loop, the server's own included.", _num_tasks()),
            gauge("kv_cache_usage_perc", "Share of KV blocks in use by requests, 0 to 1.", scheduler.blocks.pool.usage),
            Metric("cache_config_info", "The KV cache, as labels.", "gauge", {self._cache_facts: 1.0}),
            gauge(
                "kv_cache_cached_blocks",
                "KV blocks that a prompt's prefix can reuse, in use or not.",
                len(scheduler.blocks.cache),
            ),
            counter(
                "num_preemptions", "Sequences preempted for lack of KV blocks.", scheduler.sequences.num_preemptions
            ),
            counter(
                "prefix_cache_queries", "Tokens looked up in the prefix cache.", scheduler.blocks.num_prefix_queries
            ),
            counter("prefix_cache_hits", "Tokens found in the prefix cache.", scheduler.blocks.num_prefix_hits),
            *_step_cost(scheduler.step_policy.budget),
            *[metric for feature in scheduler.features for metric in feature.metrics()],
            *self._stats.metrics(),
        ]


def _step_cost(budget: StepBudget) -> list[Metric]:
    """Return metrics of the learned step costs and their goals; [] if the step budget does not learn."""
    if not isinstance(budget, TimedBudget):
        return []
    cost = asdict(budget.learned.cost)
    samples: dict[tuple[tuple[str, str], ...], float] = {
        (("part", part.removesuffix("_s")),): value for part, value in cost.items() if part.endswith("_s")
    }
    goals = (("max_itl", budget.goals.max_itl_s), ("target_ttft", budget.goals.target_ttft_s))
    return [
        Metric(
            "step_cost_seconds", "What a step takes, as learned: at least, and for each of its parts.", "gauge", samples
        ),
        *(gauge(f"{name}_seconds", f"The goal of --{name.replace('_', '-')}.", value) for name, value in goals),
    ]


def _num_tasks() -> int:
    """Return the number of asyncio tasks, or 0 without a running loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
