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
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple, TypeVar

from runtime.api import (
    ContextTooLong,
    EngineHealth,
    EngineStopped,
    FinishReason,
    Metric,
    ModelInfo,
    PreparedPrompt,
    QueueFull,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from runtime.batch import ScheduledBatch
from runtime.constrain.masked_sampling import MaskedSampling
from runtime.metrics.engine_meter import EngineMeter
from runtime.prompt import check_ids, prepare
from runtime.scheduler import Scheduler, Settled
from runtime.sequence import Sequence
from runtime.step import ForwardOutput, Runner, Step, StepResult
from runtime.token_stream import EngineTokenStream

log = logging.getLogger("oneloop.engine")

T = TypeVar("T")

STALL_S = 120.0  # a step older than this is a hang, not a long prompt
NOT_FINITE_ERROR = "the model's output for this request is not finite"


def _min_output(request: Request) -> int:
    """Tokens that there must be room for behind the prompt."""
    return min(request.params.max_tokens, 1) if isinstance(request.params, SamplingParams) else 0


class _Sink(NamedTuple):
    """The destination of what a sequence gains: request `place` of `stream`."""

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
        self._meter = EngineMeter(model, scheduler)
        self._sinks: dict[int, _Sink] = {}  # by the sequence's number
        self._in_flight: deque[Step] = deque()
        self._unsampled: ForwardOutput | None = None
        self._num_requests = 0
        self._accepting = True
        self._closing = False
        self._death: str | None = None
        self._work = asyncio.Event()
        self._masked = MaskedSampling(model, scheduler, self)
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._live(), name="engine")

    # --- EngineClient ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        return self._model

    def prepare(self, prompt_ids: Several[int], cache_salt: str | None = None) -> PreparedPrompt:
        return prepare(self._scheduler.cache, self._model.vocab_size, prompt_ids, cache_salt)

    def submit(self, requests: Several[Request], *, continues: bool = False) -> EngineTokenStream:
        if not self._accepting:
            raise EngineStopped(self._death or "the server is shutting down")
        for request in requests:
            self._check(request)
        free_rows = self._scheduler.limits.max_num_seqs - len(self._scheduler.running)
        waiting = max(0, len(self._scheduler.waiting) - free_rows)  # beyond what free rows will take up at once
        if waiting >= self._max_queue and not continues:
            self._meter.rejected()
            raise QueueFull(waiting, self._max_queue)
        sequences = [self._sequence(request) for request in requests]
        stream = EngineTokenStream(len(sequences), lambda index, reason: self._leave(sequences[index], reason))
        for index, sequence in enumerate(sequences):
            self._sinks[sequence.number] = _Sink(sequence, stream, index)
            self._masked.add(sequence)
            self._scheduler.add(sequence)
        self._meter.submitted(len(sequences))
        self._idle.clear()
        self._work.set()
        return stream

    def health(self) -> EngineHealth:
        reason = self._death
        oldest = self._in_flight[0] if self._in_flight else self._unsampled
        if reason is None and oldest is not None:
            age_s = time.monotonic() - max(oldest.launched_s, self._meter.last_settled_s)
            if age_s > STALL_S:
                reason = f"a step has been running for {age_s:.0f} s"
        return EngineHealth(reason is None, reason, len(self._scheduler.running), len(self._scheduler.waiting))

    def metrics(self) -> list[Metric]:
        return self._meter.metrics()

    async def drain(self, timeout_s: float) -> int:
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            left = list(self._sinks)
            for number in left:
                self.end(number, FinishReason.ABORT)
            return len(left)
        return 0

    async def close(self) -> None:
        await self.drain(0.0)
        self._closing = True
        self._work.set()
        await self._task
        self._masked.close()
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
                self.end(number, FinishReason.ERROR, "the engine died")
        finally:
            self._meter.idle()

    async def _run(self) -> None:
        while await self._wait_for_work():
            launched = self._launched(self._masked.sample_deferred()) or await self._launch_next()
            if self._in_flight and (not launched or len(self._in_flight) >= self._steps_in_flight):
                await self._settle_oldest()
            elif not launched and self._sinks:
                await self._sleep()  # until a late mask comes, or another request

    async def _launch_next(self) -> bool:
        """False where no sequence can advance."""
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        if batch.masked_rows:
            await self._launch_in_two(batch)
        else:
            step = self.enqueue(lambda: self._runner.launch(batch), batch)
            if step is not None:
                self._meter.launched(batch, step.launched_s)
            self._launched(step)
        return True

    async def _launch_in_two(self, batch: ScheduledBatch) -> None:
        output = self._unsampled = self.enqueue(lambda: self._runner.launch_forward(batch), batch)
        if output is None:
            return
        self._meter.launched(batch, output.launched_s)
        settled = True
        while self._in_flight and settled:
            settled = await self._settle_oldest()
        if settled:
            self._launched(await self._masked.sample(output))
        else:  # what it computed rests on a step that failed
            self._scheduler.forget_step([batch])
        self._unsampled = None

    def _launched(self, step: Step | None) -> bool:
        if step is not None:
            self._in_flight.append(step)
        return step is not None

    def enqueue(self, enqueue: Callable[[], T], batch: ScheduledBatch) -> T | None:
        """What `enqueue` gives; None where it failed, and the requests of `batch` have ended."""
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
            self._meter.idle()
            self._idle.set()
            if not self._closing:
                await self._sleep()
                self._meter.busy()
        return bool(self._sinks or self._in_flight or not self._closing)

    def wake(self) -> None:
        """There may be something to do."""
        self._work.set()

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
        self._meter.settled(step, now)
        rows = step.batch.prompt_logprobs_rows if prompt_logprobs else ()
        for row, entries in zip(rows, prompt_logprobs, strict=True):
            self._hold(row.number, entries)
        logprobs = result.logprobs  # nearly always empty
        for settled in self._scheduler.settle(step.batch, result.tokens, result.pooled):
            self._deliver(settled, now, logprobs[settled.place] if logprobs and settled.token_ids else None)
        self._meter.report(now)

    async def _fail(self) -> None:
        """The oldest step raised. Its requests end; what was launched behind it may have read its garbage and starts over."""
        failed, *behind = self._in_flight
        self._end_batch(failed.batch)
        for step in behind:
            try:
                await step.result()
            except Exception:
                log.exception("the step launched behind the failed one failed too")
        self._in_flight.clear()
        self._scheduler.forget_step([failed.batch, *(step.batch for step in behind)])

    # --- one sequence ---------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        prepared = request.prepared
        if prepared is None:
            check_ids(request.prompt_ids, self._model.vocab_size)
        elif prepared.token_ids is not request.prompt_ids or prepared.cache_salt != request.cache_salt:
            raise ValueError(f"request {request.id} has a prepared prompt of other tokens or another cache_salt")
        if len(request.prompt_ids) + _min_output(request) > self._model.max_model_len:
            raise ContextTooLong(len(request.prompt_ids), self._model.max_model_len)

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
                self._meter.gained(sequence, 0, now)
            self._forget(sequence)
            stream.put(index, [], sequence.num_cached_tokens, finish, error=error, pooled=settled.pooled)
            return
        self._meter.gained(sequence, len(token_ids), now)
        if sequence.has_matchers:
            self._masked.note(sequence, token_ids)
        stop_token_id = None
        if finish is not None:
            self._forget(sequence)
            if finish is FinishReason.STOP and token_ids[-1] in sequence.sampling.stop_token_ids:
                stop_token_id = token_ids[-1]
        if logprobs is not None:
            logprobs = logprobs[: len(token_ids)]
        stream.put(index, token_ids, sequence.num_cached_tokens, finish, stop_token_id, error, logprobs)

    def _hold(self, number: int, entries: list[TokenLogprobs] | None) -> None:
        """Hand over the prompt log-probabilities of a step; None where a logit was no number, which ends the request."""
        if entries is None:
            self.end(number, FinishReason.ERROR, NOT_FINITE_ERROR)
        elif number in self._sinks:
            _, stream, index = self._sinks[number]
            stream.hold_prompt_logprobs(index, entries)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for its reader, which has all it wants (STOP), or is gone (ABORT)."""
        if sequence.number in self._sinks:
            self._scheduler.finish(sequence, reason)
            self._forget(sequence)
            if reason is FinishReason.ABORT:
                log.info("request %s aborted after %d tokens", sequence.request.id, sequence.num_output_tokens)

    def end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence from the server's side; its reader gets `reason` and `error`."""
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
            self.end(row.number, FinishReason.ERROR, "the engine failed to compute this request")

    def _forget(self, sequence: Sequence) -> None:
        """It has finished: out of the books, into the statistics."""
        del self._sinks[sequence.number]
        self._masked.forget(sequence)
        self._meter.finished(sequence)
        self._work.set()
