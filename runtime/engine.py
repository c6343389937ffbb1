"""Engine: the one task between requests and steps. Owns the token streams; knows neither tensors nor text.

The loop keeps up to `steps_in_flight` launches ahead of the results: while one step runs, the next is scheduled and
launched, and while the loop waits, every handler runs. Idle, it waits on one event and costs nothing.

A step with masked rows is the exception: its forward pass is launched as early as any, but it is drawn when all before it has
settled, since a mask depends on what was drawn last; and nothing is launched between the two. Rows whose masks take longer
than the forward pass are left out of the draw, and of all steps until they can be drawn by themselves: nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Set
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import NamedTuple, TypeVar

from runtime.api import (
    ContextTooLong,
    EngineHealth,
    EngineStopped,
    FinishReason,
    Metric,
    ModelInfo,
    QueueFull,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.constrain.constraints import Constraints
from runtime.constrain.deferred import DeferredSampling
from runtime.metrics.loop_lag import LoopLag
from runtime.metrics.stats import EngineStats, counter, gauge
from runtime.metrics.throughput_log import ThroughputLog
from runtime.scheduler import Scheduler, Settled
from runtime.sequence import Sequence
from runtime.step import ForwardOutput, Runner, Step, StepResult
from runtime.token_stream import EngineTokenStream

log = logging.getLogger("oneloop.engine")

T = TypeVar("T")

STALL_S = 120.0  # a step older than this is a hang, not a long prompt
NOT_FINITE_ERROR = "the model's output for this request is not finite"


def _least_output(request: Request) -> int:
    """Tokens that there must be room for behind the prompt."""
    return min(request.params.max_tokens, 1) if isinstance(request.params, SamplingParams) else 0


class _Sink(NamedTuple):
    """Where what a sequence gains goes: to request `place` of `stream`."""

    sequence: Sequence
    stream: EngineTokenStream
    place: int


class Engine:
    """`EngineClient` over a scheduler and a runner. Create it on the running loop; `close` it before the loop ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        model: ModelInfo,
        *,
        max_queue: int = 256,
        steps_in_flight: int = 2,
        seed: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._model = model
        self._max_queue = max_queue
        self._steps_in_flight = steps_in_flight
        self._random = random.Random(seed)  # seeds for requests that bring none
        self._stats = EngineStats(model.max_model_len)
        self._lag = LoopLag(self._stats.loop_lag.observe)
        self._sinks: dict[int, _Sink] = {}  # by the sequence's number
        self._in_flight: deque[Step] = deque()
        self._unsampled: ForwardOutput | None = None
        self._num_requests = 0
        self._accepting = True
        self._closing = False
        self._death: str | None = None
        self._work = asyncio.Event()
        self._constraints = Constraints(model, self._work.set)
        self._deferred = DeferredSampling(scheduler, self._constraints)
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_settle_s = 0.0
        self._cache_facts = (
            ("block_size", str(model.kv_block_size)),
            ("num_gpu_blocks", str(model.num_kv_blocks)),  # vLLM's name, whatever the device
            ("enable_prefix_caching", str(scheduler.cache.enabled)),
        )
        self._throughput = ThroughputLog(self._stats)
        self._task = asyncio.create_task(self._live(), name="engine")

    # --- EngineClient ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        return self._model

    def submit(self, requests: Several[Request], *, continues: bool = False) -> EngineTokenStream:
        if not self._accepting:
            raise EngineStopped(self._death or "the server is shutting down")
        for request in requests:
            if not request.prompt_ids:
                raise ValueError("a prompt needs at least one token")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._model.vocab_size:
                raise ValueError(f"token ids go from 0 to {self._model.vocab_size - 1}")
            if len(request.prompt_ids) + _least_output(request) > self._model.max_model_len:
                raise ContextTooLong(len(request.prompt_ids), self._model.max_model_len)
        waiting = self._num_queued
        if waiting >= self._max_queue and not continues:
            self._stats.admission_rejections += 1
            raise QueueFull(waiting, self._max_queue)
        sequences = [self._sequence(request) for request in requests]
        stream = EngineTokenStream(len(sequences), lambda index, reason: self._leave(sequences[index], reason))
        for index, sequence in enumerate(sequences):
            self._sinks[sequence.number] = _Sink(sequence, stream, index)
            self._constraints.add(sequence)
            self._scheduler.add(sequence)
        self._stats.request_n.observe(len(sequences))
        self._idle.clear()
        self._work.set()
        return stream

    def health(self) -> EngineHealth:
        reason = self._death
        oldest = self._in_flight[0] if self._in_flight else self._unsampled
        if reason is None and oldest is not None:
            age_s = time.monotonic() - max(oldest.launched_s, self._last_settle_s)
            if age_s > STALL_S:
                reason = f"a step has been running for {age_s:.0f} s"
        return EngineHealth(reason is None, reason, len(self._scheduler.running), len(self._scheduler.waiting))

    def metrics(self) -> list[Metric]:
        scheduler = self._scheduler
        usage = 1.0 - scheduler.pool.num_free / scheduler.pool.num_blocks
        return [
            gauge("num_requests_running", "Requests with a row.", len(scheduler.running)),
            gauge("num_requests_waiting", "Requests in line.", len(scheduler.waiting)),
            gauge("kv_cache_usage_perc", "Share of KV blocks in use by requests, 0 to 1.", usage),
            Metric("cache_config_info", "The KV cache, as labels.", "gauge", {self._cache_facts: 1.0}),
            gauge("kv_cache_cached_blocks", "KV blocks findable by prefix, in use or not.", len(scheduler.cache)),
            counter(
                "num_preemptions", "Sequences sent back to the line for lack of blocks.", scheduler.num_preemptions
            ),
            counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", scheduler.num_prefix_queries),
            counter("prefix_cache_hits", "Tokens found in the prefix cache.", scheduler.num_prefix_hits),
            *self._stats.metrics(),
        ]

    async def drain(self, timeout_s: float) -> int:
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            left = list(self._sinks)
            for number in left:
                self._end(number, FinishReason.ABORT)
            return len(left)
        return 0

    async def close(self) -> None:
        await self.drain(0.0)
        self._closing = True
        self._work.set()
        await self._task
        self._constraints.close()
        await self._runner.close()

    # --- the loop -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._run()
        except Exception as error:
            # A bug of ours, not of a request: say so to everybody instead of letting them wait.
            log.exception("the engine loop died")
            self._accepting = False
            self._death = f"the engine died: {type(error).__name__}"
            for number in list(self._sinks):
                self._end(number, FinishReason.ERROR, "the engine died")
        finally:
            self._lag.stop()

    async def _run(self) -> None:
        while await self._wait_for_work():
            launched = self._sample_deferred() or await self._launch_next()
            if self._in_flight and (not launched or len(self._in_flight) >= self._steps_in_flight):
                await self._settle_oldest()
            elif not launched and self._sinks:
                await self._sleep()  # until a late mask comes, or another request

    async def _launch_next(self) -> bool:
        """False where no sequence can advance."""
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        masked = batch.masked_rows
        if masked:
            await self._launch_in_two(batch, masked)
        else:
            self._launch(batch)
        return True

    def _launch(self, batch: ScheduledBatch) -> None:
        step = self._enqueue(lambda: self._runner.launch(batch), batch)
        if step is not None:
            self._note_launch(batch, step.launched_s)
            self._in_flight.append(step)

    async def _launch_in_two(self, batch: ScheduledBatch, masked: Several[ScheduledRow]) -> None:
        output = self._unsampled = self._enqueue(lambda: self._runner.launch_forward(batch), batch)
        if output is None:
            return
        self._note_launch(batch, output.launched_s)
        settled = True
        while self._in_flight and settled:
            settled = await self._settle_oldest()
        if settled:
            await self._constraints.make([row.number for row in masked], output.done)
            late = {row.row for row in masked if not self._constraints.has_mask(row.number)}
            self._sample(output, self._defer(output, batch, late) if late else batch)
        else:  # what it computed rests on a step that failed
            self._scheduler.forget_step([batch])
        self._unsampled = None

    def _defer(self, output: ForwardOutput, batch: ScheduledBatch, late: Set[int]) -> ScheduledBatch:
        """What is left of `batch` without the sampling of the rows `late`, which comes with their masks."""
        rest, sampling = batch.split(late)
        snapshot = self._enqueue(lambda: output.snapshot_logits(sampling), sampling)
        if snapshot is not None:
            self._deferred.add(snapshot)
        return rest

    def _sample_deferred(self) -> bool:
        """False where there is none that can be sampled."""
        ready = self._deferred.take_ready()
        if ready is not None:
            self._sample(*ready)
        return ready is not None

    def _sample(self, output: ForwardOutput, batch: ScheduledBatch) -> None:
        masks, ended = self._constraints.take(batch.masked_rows)
        for end in ended:
            self._end(end.number, end.finish, end.error)
        step = self._enqueue(lambda: output.sample(batch, masks), batch)
        if step is not None:
            self._in_flight.append(replace(step, launched_s=output.launched_s))

    def _enqueue(self, enqueue: Callable[[], T], batch: ScheduledBatch) -> T | None:
        try:
            return enqueue()
        except Exception:
            # Memory, mostly: the device had none left for this batch. What is in flight is not touched by it.
            log.exception("a step could not be launched; its %d requests end with an error", len(batch.rows))
            self._end_batch(batch)
            self._scheduler.forget_step([batch])
            return None

    async def _wait_for_work(self) -> bool:
        """True while there is something to schedule or settle; waits, without a timer, for it; False at the end."""
        if not self._sinks and not self._in_flight:
            self._lag.stop()
            self._idle.set()
            if not self._closing:
                await self._sleep()
                self._throughput.restart()
                self._lag.start()
        return bool(self._sinks or self._in_flight or not self._closing)

    async def _sleep(self) -> None:
        self._work.clear()
        await self._work.wait()

    async def _settle_oldest(self) -> bool:
        """False where it failed, and with it all that was in flight."""
        step = self._in_flight[0]
        try:
            result = await step.result()
            prompt_logprobs = await step.prompt_logprobs()
        except Exception:
            log.exception("a step failed; its %d requests end with an error", len(step.batch.rows))
            await self._fail()
            return False
        self._in_flight.popleft()
        self._settle(step, result, prompt_logprobs)
        return True

    def _settle(self, step: Step, result: StepResult, prompt_logprobs: list[list[TokenLogprobs] | None]) -> None:
        now = time.monotonic()
        self._stats.step_time.observe(now - max(step.launched_s, self._last_settle_s))
        if step.launched_s < self._last_settle_s and (idle_s := step.idle_before_s()) is not None:
            self._stats.gpu_idle_gap.observe(idle_s)
        self._last_settle_s = now
        rows = step.batch.prompt_logprobs_rows if prompt_logprobs else ()
        for row, entries in zip(rows, prompt_logprobs, strict=True):
            self._hold(row.number, entries)
        logprobs = result.logprobs  # nearly always empty
        for settled in self._scheduler.settle(step.batch, result.tokens, result.pooled):
            self._deliver(settled, now, logprobs[settled.place] if logprobs and settled.token_ids else None)
        self._throughput.maybe(now, self._scheduler)

    async def _fail(self) -> None:
        """The oldest step raised. Its requests end; what was launched behind it may have read its garbage and starts over."""
        failed, *behind = self._in_flight
        self._end_batch(failed.batch)
        for step in behind:
            try:
                await step.result()
            except Exception:
                log.exception("so did the step behind it")
        self._in_flight.clear()
        self._scheduler.forget_step([failed.batch, *(step.batch for step in behind)])

    # --- one sequence ---------------------------------------------------------------------------------------------

    def _sequence(self, request: Request) -> Sequence:
        self._num_requests += 1
        params = request.params
        seed = params.seed if isinstance(params, SamplingParams) else 0
        return Sequence(
            request,
            number=self._num_requests,
            max_model_len=self._model.max_model_len,
            seed=self._random.getrandbits(63) if seed is None else seed,
        )

    def _deliver(self, settled: Settled, now: float, logprobs: list[TokenLogprobs] | None) -> None:
        sequence, token_ids, finish = settled.sequence, settled.token_ids, settled.finish
        _, stream, index = self._sinks[sequence.number]
        error = NOT_FINITE_ERROR if finish is FinishReason.ERROR else None
        if not token_ids:
            if error is None:
                self._note_prompt(sequence, now)
            self._forget(sequence)
            stream.put(index, [], sequence.num_cached_tokens, finish, error=error, pooled=settled.pooled)
            return
        self._note_tokens(sequence, len(token_ids), now)
        if sequence.has_matchers:
            self._constraints.note(sequence.number, token_ids)
        stop_token_id = None
        if finish is not None:
            self._forget(sequence)
            if finish is FinishReason.STOP and token_ids[-1] in sequence.sampling.stop_token_ids:
                stop_token_id = token_ids[-1]
        if logprobs is not None:
            logprobs = logprobs[: len(token_ids)]
        stream.put(index, token_ids, sequence.num_cached_tokens, finish, stop_token_id, error, logprobs)

    def _hold(self, number: int, entries: list[TokenLogprobs] | None) -> None:
        """What a step told of a prompt, None where it was no number."""
        if entries is None:
            self._end(number, FinishReason.ERROR, NOT_FINITE_ERROR)
        elif number in self._sinks:
            _, stream, index = self._sinks[number]
            stream.hold_prompt_logprobs(index, entries)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        """The reader's doing: it has all it wants (STOP), or is gone (ABORT)."""
        if sequence.number in self._sinks:
            self._scheduler.finish(sequence, reason)
            self._forget(sequence)
            if reason is FinishReason.ABORT:
                log.info("request %s aborted after %d tokens", sequence.request.id, sequence.num_output_tokens)

    def _end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        """Our doing: the reader is told."""
        if number in self._sinks:
            sequence, stream, index = self._sinks[number]
            self._scheduler.finish(sequence, reason)
            self._forget(sequence)
            complete = reason is FinishReason.STOP
            if not complete:
                log.warning("request %s ended by the server: %s", sequence.request.id, error or reason)
            stream.put(index, [], sequence.num_cached_tokens, reason, error=error, complete=complete)

    def _end_batch(self, batch: ScheduledBatch) -> None:
        for row in batch.rows:
            self._end(row.number, FinishReason.ERROR, "the engine failed to compute this request")

    def _forget(self, sequence: Sequence) -> None:
        """It has finished: out of the books, into the statistics."""
        del self._sinks[sequence.number]
        self._constraints.forget(sequence.number)
        self._work.set()
        stats, now = self._stats, time.monotonic()
        assert sequence.finish is not None
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

    # --- numbers --------------------------------------------------------------------------------------------------

    @property
    def _num_queued(self) -> int:
        """Waiting beyond what free rows will take up at once."""
        free_rows = self._scheduler.limits.max_num_seqs - len(self._scheduler.running)
        return max(0, len(self._scheduler.waiting) - free_rows)

    def _note_launch(self, batch: ScheduledBatch, launched_s: float) -> None:
        self._stats.iteration_tokens.observe(batch.num_tokens)
        self._stats.batch_size.observe(len(batch.rows))
        if batch.num_preempted:
            log.warning(
                "%d requests preempted for lack of KV blocks (%d running, %d waiting): kv-cache-memory is short",
                batch.num_preempted, len(self._scheduler.running), len(self._scheduler.waiting),
            )  # fmt: skip
        for row in batch.rows:
            sequence = self._sinks[row.number].sequence
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = launched_s
                self._stats.queue_time.observe(launched_s - sequence.request.arrival_s)

    def _note_tokens(self, sequence: Sequence, num: int, now: float) -> None:
        stats = self._stats
        stats.generation_tokens += num
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            self._note_prompt(sequence, now)
            stats.time_to_first_token.observe(now - sequence.request.arrival_s)
        elif sequence.last_token_s is not None:
            for _ in range(num):  # those that come together have waited alike
                stats.inter_token_latency.observe((now - sequence.last_token_s) / num)
        sequence.last_token_s = now

    def _note_prompt(self, sequence: Sequence, now: float) -> None:
        stats = self._stats
        stats.prompt_tokens += sequence.num_prompt_tokens
        stats.prompt_tokens_cached += sequence.num_cached_tokens
        stats.request_computed_tokens.observe(sequence.num_prompt_tokens - sequence.num_cached_tokens)
        if sequence.first_scheduled_s is not None:
            stats.prefill_time.observe(now - sequence.first_scheduled_s)
