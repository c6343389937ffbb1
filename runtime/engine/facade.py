"""Engine: the one task between requests and steps. Owns the token streams; knows neither tensors nor text.

The loop keeps up to `steps_in_flight` launches ahead of the results: while one step runs, the next is scheduled and
launched, and while the loop waits, every handler runs. Idle, it waits on one event and costs nothing.

A step with masked rows is the exception: its forward pass is launched as early as any, but it is drawn when all before it has
settled, since a mask depends on what was drawn last; and nothing is launched between the two. Rows whose masks take longer
than the forward pass are left out of the draw, and of all steps until they can be drawn by themselves: nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from runtime.api import (
    Activity,
    Adapter,
    AdapterGone,
    Busy,
    ContextTooLong,
    EngineHealth,
    EngineStopped,
    Finished,
    FinishReason,
    MediaItem,
    Metric,
    ModelInfo,
    Output,
    PoolingParams,
    PreparedPrompt,
    ProbeFailed,
    ProfileError,
    Request,
    SamplingParams,
    SleepLevel,
    TokenLogprobs,
    cache_root,
)
from runtime.batch import NOT_FINITE, ScheduledBatch
from runtime.constrain.masked_sampling import MaskedSampling
from runtime.engine.admission import Admission, AdmissionLimits, Callers
from runtime.engine.deadlines import Deadlines, Limit
from runtime.engine.prompt import check_ids, prepare
from runtime.engine.sleeping import Asleep, Bed, CallLater, Sleeping
from runtime.engine.token_stream import EngineTokenStream, Handover
from runtime.fault import STEP_ERROR, Fault, RowFailed
from runtime.kv.prefix_cache import BlockHash
from runtime.lora.adapters import Adapters
from runtime.metrics.engine_meter import EngineMeter
from runtime.metrics.step_health import HealthLimits, StepHealth
from runtime.profiling.session import Profiling, Recorder
from runtime.scheduler import Scheduler
from runtime.scheduling.settling import Settled
from runtime.sequence import Sequence, Status
from runtime.step import ForwardOutput, Runner, Step, StepResult

log = logging.getLogger("oneloop.engine")

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_LIMIT_S = 5.0  # for a step that is being computed when the engine is closed
NOT_FINITE_ERROR = "the model's output for this request is not finite"


def _min_output(request: Request) -> int:
    """Tokens that there must be room for behind the prompt."""
    return min(request.params.max_tokens, 1) if isinstance(request.params, SamplingParams) else 0


def _is_sound(result: StepResult) -> bool:
    """Whether a step computed what it should: not where all that it sampled is no number."""
    return not result.tokens or any(token_ids != [NOT_FINITE] for token_ids in result.tokens)


class _Sink(NamedTuple):
    """The destination of what a sequence gains: request `place` of `stream`."""

    sequence: Sequence
    stream: EngineTokenStream
    place: int


def _of(sequence: Sequence) -> dict[str, str]:
    """What the log has of a line that is about a sequence: the id of whoever asked."""
    return {"request_id": sequence.request.parent_id or sequence.request.id}


def _none_to_record() -> Recorder:
    raise ProfileError("this engine records no profiles")


class _DeviceLost(Exception):
    """No step can be computed any more."""


class Engine:
    """`EngineClient` over a scheduler and a runner. Create it on the running loop; `close` it before the loop ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        model: ModelInfo,
        *,
        admission: AdmissionLimits | None = None,
        steps_in_flight: int = 2,
        stream_interval: int = 1,
        seed: int | None = None,
        health_limits: HealthLimits | None = None,
        recorder: Callable[[], Recorder] = _none_to_record,
        bed: Bed | None = None,
        sleep_after_s: float | None = None,
        call_later: CallLater | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        callers: Callers | None = None,
        more_metrics: Callable[[], list[Metric]] | None = None,
    ) -> None:
        """`callers`: of other engines too, where limits are of all together. `more_metrics`: of what the engine does not see."""
        self._scheduler = scheduler
        self.runner = runner
        self._model = model
        self._admission = Admission(admission or AdmissionLimits(), clock, callers)
        self._deadlines = Deadlines()
        self._alarm: asyncio.TimerHandle | None = None  # for the next of them, since a step may hang
        self._alarm_s: float | None = None
        self._steps_in_flight = steps_in_flight
        self._stream_interval = stream_interval
        self._handover = Handover()
        self._random = random.Random(seed)  # seeds for requests that bring none
        self._meter = EngineMeter(model, scheduler)
        self._when_finished: list[Callable[[Finished], None]] = []
        self._failed_observers: set[str] = set()
        self._health = StepHealth(health_limits or HealthLimits())
        self._profiling = Profiling(recorder, self._meter)
        self._clock = clock
        self._sinks: dict[int, _Sink] = {}  # by the sequence's number
        self._in_flight: deque[Step] = deque()
        self._unsampled: ForwardOutput | None = None
        self._num_requests = 0
        self._last_resolved = PoolingParams(), PoolingParams()  # as they were asked for, and what they came to
        self._accepting = True
        self._closing = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it will never serve again
        self._lost: BaseException | None = None  # what the device raised beside a step, after which it computes no more
        self._probing: asyncio.Future[bool] | None = None  # True: a step has settled; False: no work is left
        self._spared: set[int] = set()  # sequences that were the largest of a step for which there was no memory
        self._work = asyncio.Event()
        self._sleeping = Sleeping(bed, sleep_after_s, self.wake, clock, call_later)
        self._masked = MaskedSampling(model, scheduler, self)
        self._more_metrics = more_metrics
        self._adapters = adapters
        if adapters is not None:
            adapters.connect(self.wake, self._end_without_adapter)
        self._idle = asyncio.Event()
        self._idle.set()
        self._rested = asyncio.Event()
        self._task = asyncio.create_task(self._live(), name="engine")

    # --- EngineClient ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def replicas(self) -> tuple[Engine, ...]:
        return (self,)

    @property
    def adapters(self) -> Adapters | None:
        return self._adapters

    @property
    def load(self) -> float:
        """See `Replica`."""
        scheduler = self._scheduler
        num = len(scheduler.running) + len(scheduler.waiting)
        return num / scheduler.limits.max_num_seqs + scheduler.blocks.pool.usage + 2 * bool(self._sleeping.level)

    def num_cached(self, prompt: PreparedPrompt) -> int:
        """See `Replica`."""
        return self._scheduler.blocks.cache.num_cached(cast("Several[BlockHash]", prompt.block_hashes))

    def prepare(
        self, prompt_ids: Several[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        root = cache_root(cache_salt, adapter)
        return prepare(self._scheduler.blocks.cache, self._model.vocab_size, prompt_ids, root, media)

    def submit(self, requests: Several[Request], *, continues: bool = False) -> EngineTokenStream:
        if not self._accepting:
            raise self._stopped()
        known_ids: Several[int] | None = None
        for request in requests:
            self._check(request, knows_ids=request.prompt_ids is known_ids)
            known_ids = request.prompt_ids
        if not continues:
            with self._counting_refusals():
                self._admission.check(requests, self._scheduler.waiting, len(self._scheduler.sequences.free_rows))
        group = self._num_requests + 1
        stream = self._admit([self._sequence(request, group) for request in requests], continues=continues)
        self._meter.submitted(len(requests))
        return stream

    def check_room(self, caller: bytes | None) -> None:
        with self._counting_refusals():
            self._admission.check_caller(caller, self._scheduler.waiting, len(self._scheduler.sequences.free_rows))

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Busy as busy:
            self._meter.rejected(busy.reason)
            raise

    def health(self) -> EngineHealth:
        num_running, num_waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        if self._death.done():
            return EngineHealth(False, self._death.result(), num_running, num_waiting, hopeless=True)
        oldest = self._in_flight[0] if self._in_flight else self._unsampled
        batch = age_s = None
        if oldest is not None:
            batch, age_s = oldest.batch, self._clock() - max(oldest.launched_s, self._meter.last_settled_s)
        verdict = self._health.verdict(batch, age_s or 0.0)
        return EngineHealth(
            verdict.reason is None, verdict.reason, num_running, num_waiting, verdict.hopeless, self._health.failing,
            self._sleeping.level,
        )  # fmt: skip

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        self._when_finished.append(call)

    def abort(self, ids: Collection[str] | None = None) -> int:
        asked = [
            number
            for number, (sequence, _, _) in self._sinks.items()
            if not sequence.request.is_probe and (ids is None or not sequence.request.names.isdisjoint(ids))
        ]
        for number in asked:
            self.end(number, FinishReason.ABORT)
        return len(asked)

    def reset_prefix_cache(self) -> None:
        self._scheduler.blocks.cache.clear()

    async def probe(self) -> None:
        while self._accepting and self._sinks:  # others' steps prove as much, and cost nothing
            if self._probing is None or self._probing.done():
                self._probing = asyncio.get_running_loop().create_future()
            probing = self._probing
            either: list[asyncio.Future[Any]] = [probing, self._death]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if probing.done() and probing.result():
                return
        if not self._accepting:
            raise self._stopped()
        params: SamplingParams | PoolingParams = PoolingParams()
        if self._model.generates:
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        async with self._admit([self._sequence(Request("health", [0], params, is_probe=True))]) as stream:
            async for (output,) in stream:
                if output.finish is FinishReason.ERROR:
                    raise ProbeFailed(output.error or "the token could not be computed")
                if output.finish is FinishReason.ABORT:
                    raise self._stopped()

    def _tell_probe(self, has_settled: bool) -> None:
        if self._probing is not None and not self._probing.done():
            self._probing.set_result(has_settled)

    def _stopped(self) -> EngineStopped:
        return EngineStopped(self._death.result() if self._death.done() else "the server is shutting down")

    async def death(self) -> str:
        return await asyncio.shield(self._death)

    def metrics(self) -> list[Metric]:
        more = [] if self._more_metrics is None else self._more_metrics()
        return [*self._meter.metrics(), self._sleeping.metric(), *more]

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        live = [sink.sequence for sink in self._sinks.values()]
        return self._meter.activity(live, self._clock(), after_step, after_request, num_cells)

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        await self._sleeping.become(level)

    async def wake_up(self) -> None:
        await self._sleeping.become(SleepLevel.AWAKE)

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        await self._profiling.start(path, delay_steps, num_steps)

    async def stop_profile(self) -> Path:
        return await self._profiling.stop()

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

    async def close(self, limit_s: float = CLOSE_LIMIT_S) -> bool:
        await self.drain(0.0)
        await self._profiling.close()
        self._closing = True
        self._work.set()
        ended, _ = await asyncio.wait({self._task}, timeout=limit_s)
        if not ended:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._masked.close()
        if self._adapters is not None:
            self._adapters.close()
        return bool(await self.runner.close() and ended)

    # --- the loop -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._run()
        except _DeviceLost as error:
            where = ", ".join(getattr(error.__cause__, "__notes__", ()))
            self._die(
                f"the device cannot compute any more: {type(error.__cause__).__name__}" + (where and f" ({where})")
            )
        except Exception as error:
            # A bug of ours, not of a request: say so to everybody instead of letting them wait.
            log.exception("the engine loop died")
            self._die(f"the engine died: {type(error).__name__}")
        finally:
            self._meter.idle()
            self._sleeping.close()

    def _die(self, why: str) -> None:
        self._accepting = False
        self._death.set_result(why)
        for number in list(self._sinks):
            self.end(number, FinishReason.ERROR, why)
        self._idle.set()  # nobody needs to wait for anything

    async def _run(self) -> None:
        while await self._wait_for_work():
            if self._lost is not None:
                raise _DeviceLost from self._lost
            self._end_late()
            if self._sleeping.level and not await self._wake_up():
                continue
            await self._let_come()
            launched = self._launched(self._masked.sample_deferred()) or await self._launch_next()
            if (captured := self.runner.capture_next(idle=False)) is not None:
                await captured
            if self._in_flight and (not launched or len(self._in_flight) >= self._steps_in_flight):
                await self._settle_oldest()
            elif not launched and self._sinks:
                await self._sleep()  # until a late mask comes, or another request

    async def _wake_up(self) -> bool:
        """False where there is no runner: nobody needs one any more, or it could not be built."""
        if not self._sinks and not self._sleeping.should_wake:
            return False
        try:
            self.runner = await self._sleeping.wake()
        except Exception:
            log.exception("the engine cannot wake; the next request tries again")
            for number in list(self._sinks):
                self.end(number, FinishReason.ERROR, "the model could not be loaded again")
            return False
        return True

    def _take_runner(self) -> Runner:
        """The runner, which the engine has no more; nor is there anything left of what it kept for others."""
        runner, self.runner = self.runner, Asleep()
        self._scheduler.blocks.cache.clear()
        for feature in self._scheduler.features:
            feature.clear()
        return runner

    async def _let_come(self) -> None:
        """Decide the next step no sooner than has to be: who comes while a long one is computed need not wait for two."""
        if len(self._in_flight) != 1 or self._steps_in_flight != 2:
            return
        (step,) = self._in_flight
        begun_s = max(step.launched_s, self._meter.last_settled_s)
        left_s = begun_s + self._scheduler.step_policy.budget.decide_after_s(step.batch) - self._clock()
        if left_s > 0:
            with contextlib.suppress(Exception):  # what the device raises is told where the step settles
                async with asyncio.timeout(left_s):
                    await step.done.wait()

    async def _launch_next(self) -> bool:
        """False where no sequence can advance."""
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        for feature in self._scheduler.features:
            feature.launches(batch, self)
        if batch.masked_rows:
            await self._launch_in_two(batch)
        else:
            step = self.enqueue(lambda: self.runner.launch(batch), batch)
            if step is not None:
                self._note_launch(batch, step.launched_s)
            elif self._sinks:
                await asyncio.sleep(0)  # another try at once, but not before others had their turn
            self._launched(step)
        return True

    async def _launch_in_two(self, batch: ScheduledBatch) -> None:
        output = self._unsampled = self.enqueue(lambda: self.runner.launch_forward(batch), batch)
        if output is None:
            return
        self._note_launch(batch, output.launched_s)
        settled = True
        while self._in_flight and settled:
            settled = await self._settle_oldest()
        if settled:
            self._launched(await self._masked.sample(output))
        else:  # what it computed rests on a step that failed
            self._scheduler.forget_step([batch])
        self._unsampled = None

    def _note_launch(self, batch: ScheduledBatch, launched_s: float) -> None:
        num_started = self.observe(self._meter.launched, batch, launched_s)
        if num_started:
            self._admission.started(num_started, others_wait=bool(self._scheduler.waiting))

    def _launched(self, step: Step | None) -> bool:
        if step is not None:
            self._in_flight.append(step)
        return step is not None

    def enqueue(self, enqueue: Callable[[], T], batch: ScheduledBatch) -> T | None:
        """What `enqueue` gives; None where it failed, and the requests of `batch` have ended."""
        try:
            return enqueue()
        except Exception as error:
            # What is in flight is not touched by it.
            log.exception("a step of %d requests could not be launched", len(batch.rows))
            self._blame(error, batch)
            self._scheduler.forget_step([batch])
            return None

    def _blame(self, error: Exception, batch: ScheduledBatch) -> None:
        """End the requests of a failed step that it has to cost; the others start over. Raises _DeviceLost."""
        if isinstance(error, RowFailed):
            self.end(error.number, FinishReason.ERROR, STEP_ERROR)
            return
        self._health.failed(self._clock())
        fault = self.runner.fault(error)
        if fault is Fault.LOST:
            raise _DeviceLost from error
        if fault is Fault.MEMORY and batch.rows:
            self._make_room(batch)
        else:
            self._end_batch(batch)

    def _make_room(self, batch: ScheduledBatch) -> None:
        """There was no memory for a step. All start over, unless it was the same sequence's size already: it ends."""
        largest = max(batch.rows, key=lambda row: row.num_tokens).number
        if largest in self._spared:
            self.end(largest, FinishReason.ERROR, "there is no memory to compute this request")
        else:
            self._spared.add(largest)

    async def _wait_for_work(self) -> bool:
        """True while there is something to schedule or settle; waits, without a timer, for it; False at the end."""
        if not self._sinks and not self._in_flight:
            self._meter.idle()
            self._deadlines.clear()
            self._set_alarm()
            self._tell_probe(False)
            self._idle.set()
            if not self._closing:
                self._work.clear()
                await self._sleeping.rest(self._take_runner)
                await self._capture_while_idle()
                await self._work.wait()
                self._sleeping.stop_waiting()
                self._meter.busy()
        return bool(self._sinks or self._in_flight or not self._closing)

    async def _capture_while_idle(self) -> None:
        """One after another: whoever comes waits for one at most."""
        while not self._work.is_set() and (captured := self.runner.capture_next(idle=True)) is not None:
            await captured
        if not self._work.is_set():
            self._rested.set()

    async def rested(self) -> None:
        """Return when there is nothing to do, nor to be prepared, or no step can be computed any more: for whoever measures."""
        self._rested.clear()
        self.wake()
        await asyncio.wait(
            {self._task, rested := asyncio.ensure_future(self._rested.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        rested.cancel()

    def wake(self) -> None:
        """There may be something to do."""
        self._work.set()

    def lose(self, error: BaseException) -> None:
        """No step can be computed any more, as has become known beside steps."""
        self._lost = error
        self.wake()

    def note_deferred(self, sampling: ScheduledBatch) -> None:
        """The masks of its rows were late."""
        self.observe(self._meter.deferred, sampling, self._clock())

    async def _sleep(self) -> None:
        self._work.clear()
        await self._work.wait()

    async def _settle_oldest(self) -> bool:
        """False where it failed, and with it all that was in flight."""
        step = self._in_flight[0]
        try:
            result = await step.result()
            prompt_logprobs = await step.prompt_logprobs()
        except Exception as error:
            log.exception("a step of %d requests failed", len(step.batch.rows))
            await self._fail(error)
            return False
        self._in_flight.popleft()
        self._settle(step, result, prompt_logprobs)
        return True

    def _settle(self, step: Step, result: StepResult, prompt_logprobs: list[list[TokenLogprobs] | None]) -> None:
        now = self._clock()
        waited_s = max(0.0, step.launched_s - self._meter.last_settled_s)  # where it was not launched one step ahead
        took_s = self.observe(self._meter.settled, step, now)
        if took_s is not None:
            self.observe(self._health.settled, step.batch, took_s)
            features = self._scheduler.features
            if not any(feature.slows_steps for feature in features):
                self.observe(self._scheduler.step_policy.budget.settled, step.batch, took_s)
            for feature in features:
                self.observe(feature.took, step.batch, took_s + waited_s)
        if self._probing is not None and _is_sound(result):
            self._tell_probe(True)
        rows = step.batch.prompt_logprobs_rows if prompt_logprobs else ()
        for row, entries in zip(rows, prompt_logprobs, strict=True):
            self._hold(row.number, entries)
        logprobs = result.logprobs  # nearly always empty
        all_settled = self._scheduler.settle(step.batch, result.tokens, result.pooled)
        self.observe(self._meter.gained, all_settled, now)
        sinks, notes_all = self._sinks, self._admission.counts_tokens
        for settled in all_settled:
            sequence, token_ids, finish, place, _ = settled
            if finish is None and not logprobs:  # as nearly all
                _, stream, index = sinks[sequence.number]
                if stream.put_ids(index, token_ids):
                    if notes_all or sequence.has_matchers:
                        self._note_gained(sequence, token_ids)
                    continue
            self._deliver(settled, logprobs[place] if logprobs and token_ids else None)
        self.observe(self._profiling.settled)
        self.observe(self._meter.report, now)

    def observe(self, observe: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function that only counts, learns or reports. An exception in it is logged, and ends no request. Return what it
        returns, or None after an exception."""
        try:
            return observe(*args, **kwargs)
        except Exception:
            name = getattr(observe, "__qualname__", repr(observe))
            if name not in self._failed_observers:  # it may fail in every step
                self._failed_observers.add(name)
                log.exception("%s failed. Requests continue. Further failures of it are not logged", name)
            return None

    async def _fail(self, error: Exception) -> None:
        """The oldest step raised, and ends whom it must; what was launched behind it may have read garbage and starts over."""
        failed, *behind = self._in_flight
        self._blame(error, failed.batch)
        for step in behind:
            try:
                await step.result()
            except Exception:
                log.exception("the step launched behind the failed one failed too")
        self._in_flight.clear()
        self._scheduler.forget_step([failed.batch, *(step.batch for step in behind)])

    def _admit(self, sequences: list[Sequence], *, continues: bool = False) -> EngineTokenStream:
        stream = EngineTokenStream(
            len(sequences),
            lambda index, reason: self._leave(sequences[index], reason),
            self._stream_interval,
            lambda index: self.observe(self._meter.delivered, sequences[index], stream.held_s),
            handover=self._handover,
            left=lambda indices: self._note_left([sequences[index] for index in indices]),
        )
        for index, sequence in enumerate(sequences):
            self._sinks[sequence.number] = _Sink(sequence, stream, index)
            self._masked.add(sequence)
            self._scheduler.add(sequence)
            self._limit(sequence, continues=continues)
        requests = [sequence.request for sequence in sequences]
        self._admission.admitted(requests, others_wait=len(self._scheduler.waiting) > len(sequences))
        self._idle.clear()
        if not requests[0].is_probe:
            self._sleeping.used()
        self._work.set()
        return stream

    # --- deadlines ------------------------------------------------------------------------------------------------

    def _limit(self, sequence: Sequence, *, continues: bool) -> None:
        """Note when it has to have ended, and to have started, if it has to."""
        deadline_s, queue_time_s = sequence.request.deadline_s, self._admission.limits.max_queue_time_s
        if deadline_s is not None:
            self._deadlines.add(deadline_s, sequence.number, Limit.DEADLINE, self._sinks)
        if queue_time_s is not None and not continues and not sequence.request.is_probe:
            self._deadlines.add(self._clock() + queue_time_s, sequence.number, Limit.QUEUE_TIME, self._sinks)
        if self._deadlines.next_s != self._alarm_s:
            self._set_alarm()

    def _set_alarm(self) -> None:
        self._alarm_s = self._deadlines.next_s
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm_s is not None:
            delay_s = max(0.0, self._alarm_s - self._clock())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._wake_late)

    def _wake_late(self) -> None:
        self._end_late()
        self._set_alarm()

    def _end_late(self) -> None:
        """End whose time is over."""
        next_s = self._deadlines.next_s
        if next_s is None or next_s > (now := self._clock()):
            return
        for number, limit in self._deadlines.take_due(now):
            if limit is Limit.DEADLINE:
                self.end(number, FinishReason.TIMEOUT, "its deadline has passed")
            elif number in self._sinks and self._sinks[number].sequence.first_scheduled_s is None:
                retry_after_s = self._admission.retry_after_s(len(self._scheduler.waiting))
                self.end(number, FinishReason.TIMEOUT, "it has waited too long to start", retry_after_s)

    # --- one sequence ---------------------------------------------------------------------------------------------

    def _check(self, request: Request, *, knows_ids: bool) -> None:
        """`knows_ids`: those of its prompt have been looked at."""
        self._model.check(request)
        for feature in self._scheduler.features:
            feature.check(request)
        prepared = request.prepared
        if prepared is None:
            if not knows_ids:
                check_ids(request.prompt_ids, self._model.vocab_size)
        elif (
            prepared.token_ids is not request.prompt_ids
            or prepared.cache_root != request.cache_root
            or prepared.media != request.media
        ):
            raise ValueError(
                f"request {request.id} has a prepared prompt of other tokens, another cache_salt, adapter or media"
            )
        adapter = request.adapter
        if adapter is not None and (self._adapters is None or not self._adapters.slots.knows(adapter.key)):
            raise AdapterGone(f"the adapter {adapter.name} has been unloaded")
        if len(request.prompt_ids) + _min_output(request) > self._model.max_model_len:
            raise ContextTooLong(len(request.prompt_ids), self._model.max_model_len)

    def _sequence(self, request: Request, group: int | None = None) -> Sequence:
        self._num_requests += 1
        params = request.params
        if isinstance(params, PoolingParams):
            resolved = self._resolved(params, len(request.prompt_ids))
            return Sequence(
                request if resolved is params else replace(request, params=resolved),
                number=self._num_requests,
                max_model_len=self._model.max_model_len,
                seed=0,
                group=group,
            )
        seed = params.seed
        return Sequence(
            request,
            number=self._num_requests,
            max_model_len=self._model.max_model_len,
            seed=self._random.getrandbits(63) if seed is None else seed,
            group=group,
        )

    def _resolved(self, params: PoolingParams, num_tokens: int) -> PoolingParams:
        """`ModelInfo.resolve`: one object for all texts that come with the same one, so that they are soon seen to be alike."""
        if params.token_type_ids is not None:  # a text's own
            return self._model.resolve(params, num_tokens)
        if params is not self._last_resolved[0]:
            self._last_resolved = params, self._model.resolve(params, num_tokens)
        return self._last_resolved[1]

    def _deliver(self, settled: Settled, logprobs: list[TokenLogprobs] | None) -> None:
        sequence, token_ids, finish, _, pooled = settled
        _, stream, index = self._sinks[sequence.number]
        if finish is None and logprobs is None:
            output = Output(index, token_ids, None, None, sequence.num_cached_tokens)
        else:
            stop_token_id = None
            if token_ids and finish is FinishReason.STOP and token_ids[-1] in sequence.sampling.stop_token_ids:
                stop_token_id = token_ids[-1]
            error = NOT_FINITE_ERROR if finish is FinishReason.ERROR else None
            output = Output(index, token_ids, finish, stop_token_id, sequence.num_cached_tokens, error, pooled=pooled)
            if logprobs is not None:
                output.logprobs = logprobs[: len(token_ids)]
        output.num_draft_tokens, output.num_accepted_tokens = sequence.num_draft_tokens, sequence.num_accepted_tokens
        if token_ids:
            self._note_gained(sequence, token_ids)
        if finish is not None:
            self._forget(sequence)
        stream.put(output)

    def _note_gained(self, sequence: Sequence, token_ids: list[int]) -> None:
        if self._admission.counts_tokens:
            self._admission.gained(sequence.request.caller, len(token_ids))
        if sequence.has_matchers:
            self._masked.note(sequence, token_ids)

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

    def _note_left(self, sequences: list[Sequence]) -> None:
        """Log, in one line however many they are, that their reader has left before their end."""
        num_tokens = sum([sequence.num_output_tokens for sequence in sequences])
        others = f" and {len(sequences) - 1} more of it" if len(sequences) > 1 else ""
        log.info(
            "request %s%s aborted after %d tokens", sequences[0].request.id, others, num_tokens, extra=_of(sequences[0])
        )

    def end(
        self, number: int, reason: FinishReason, error: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """End a sequence from the server's side; its reader gets all of these."""
        if number in self._sinks:
            sequence, stream, index = self._sinks[number]
            self._scheduler.finish(sequence, reason)
            self._forget(sequence)
            complete = reason is FinishReason.STOP
            if not complete:
                is_ours = reason not in (FinishReason.TIMEOUT, FinishReason.INVALID)
                level = logging.WARNING if is_ours else logging.INFO
                log.log(
                    level, "request %s ended by the server: %s", sequence.request.id, error or reason, extra=_of(sequence)
                )  # fmt: skip
            output = Output(
                index, [], reason, None, sequence.num_cached_tokens, error, complete=complete, retry_after_s=retry_after_s,
                num_draft_tokens=sequence.num_draft_tokens, num_accepted_tokens=sequence.num_accepted_tokens,
            )  # fmt: skip
            stream.put(output)

    def _end_without_adapter(self, key: int, why: str) -> None:
        """End who waits for an adapter that cannot come."""
        for number, sink in list(self._sinks.items()):
            adapter = sink.sequence.request.adapter
            if adapter is not None and adapter.key == key and sink.sequence.status is Status.WAITING:
                self.end(number, FinishReason.ERROR, why)

    def _end_batch(self, batch: ScheduledBatch) -> None:
        for row in batch.rows:
            self.end(row.number, FinishReason.ERROR, STEP_ERROR)

    def _forget(self, sequence: Sequence) -> None:
        """It has finished: out of the books, into the statistics."""
        del self._sinks[sequence.number]
        self._spared.discard(sequence.number)
        self._admission.ended(sequence.request.caller)
        self._masked.forget(sequence)
        if (finished := self.observe(self._meter.finished, sequence)) is not None:
            for call in self._when_finished:
                self.observe(call, finished)
        if not sequence.request.is_probe:
            self._sleeping.used()
        self._work.set()
