"""Engine: interface for request handlers. It creates the engine's objects and connects them. It contains neither tensors nor
text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Several
from pathlib import Path
from typing import cast

from runtime.api import (
    Activity,
    Adapter,
    EngineHealth,
    EngineStopped,
    Finished,
    FinishReason,
    MediaItem,
    Metric,
    ModelInfo,
    PoolingParams,
    PreparedPrompt,
    ProbeFailed,
    ProfileError,
    Request,
    SamplingParams,
    SleepLevel,
    cache_root,
)
from runtime.constrain.mask_maker import MaskMaker
from runtime.engine.admission import Admission, AdmissionLimits, Callers
from runtime.engine.deadlines import RequestDeadlines
from runtime.engine.faults import Faults
from runtime.engine.intake import Intake
from runtime.engine.loop import Loop
from runtime.engine.observers import Observers
from runtime.engine.open_requests import OpenRequests
from runtime.engine.probes import Probes
from runtime.engine.prompt import prepare
from runtime.engine.sleeping import CallLater, RunnerFactory, Sleeping
from runtime.engine.token_stream import EngineTokenStream
from runtime.kv.prefix_cache import BlockHash
from runtime.lora.adapters import Adapters
from runtime.metrics.engine_meter import EngineMeter
from runtime.metrics.step_health import HealthLimits, StepHealth
from runtime.profiling.session import Profiling, Recorder
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence, SequenceStatus
from runtime.step import Runner

CLOSE_LIMIT_S = 5.0  # time for the current step to end when the engine is closed


def _none_to_record() -> Recorder:
    raise ProfileError("this engine does not support profiling")


class Engine:
    """Implementation of `EngineClient`, with a scheduler and a runner. Create it on the running event
    loop, and `close` it before that loop ends."""

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
        runner_factory: RunnerFactory | None = None,
        sleep_after_s: float | None = None,
        call_later: CallLater | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        callers: Callers | None = None,
        more_metrics: Callable[[], list[Metric]] | None = None,
    ) -> None:
        """Create an engine and its loop. `callers`: admission state, shared with other engines if limits apply to all together.
        `more_metrics`: function that returns metrics counted outside the engine."""
        work = asyncio.Event()
        self.adapters = adapters
        self._scheduler = scheduler
        self.model = model
        self._clock = clock
        self._accepting = True
        self._more_metrics = more_metrics
        self._admission = Admission(admission or AdmissionLimits(), clock, callers)
        self._intake = Intake(scheduler, model, adapters, seed)
        self._meter = EngineMeter(model, scheduler)
        self._health = StepHealth(health_limits or HealthLimits())
        self._profiling = Profiling(recorder, self._meter)
        self._sleeping = Sleeping(runner_factory, sleep_after_s, work.set, clock, call_later)
        self._mask_maker = MaskMaker(model, work.set, looks_ahead=any(each.looks_ahead for each in scheduler.features))
        self._observers = Observers(scheduler, self._admission, self._meter, self._health, self._profiling)
        self._requests = OpenRequests(
            scheduler, self._admission, self._observers, self._mask_maker, self._changed, stream_interval
        )
        self._faults = Faults(self._requests, self._health, clock)
        self._deadlines = RequestDeadlines(self._requests, self._admission, clock, lambda: len(scheduler.waiting))
        self._probes = Probes()
        self.loop = Loop(
            scheduler, runner, self._requests, work, mask_maker=self._mask_maker, observers=self._observers,
            faults=self._faults, deadlines=self._deadlines, probes=self._probes, sleeping=self._sleeping,
            steps_in_flight=steps_in_flight, clock=clock,
        )  # fmt: skip
        if adapters is not None:
            adapters.connect(work.set, self._end_without_adapter)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[Engine, ...]:
        return (self,)

    @property
    def load(self) -> float:
        """Load of the engine; 2 is added while it sleeps. See `EngineReplica`."""
        return self._scheduler.load + 2 * bool(self._sleeping.level)

    def num_cached(self, prompt: PreparedPrompt) -> int:
        """Return how many leading blocks of `prompt` are in the prefix cache. See `EngineReplica`."""
        return self._scheduler.blocks.cache.num_cached(cast("Several[BlockHash]", prompt.block_hashes))

    def health(self) -> EngineHealth:
        num_running, num_waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        if self._faults.death.done():
            return EngineHealth(False, self._faults.death.result(), num_running, num_waiting, hopeless=True)
        loop = self.loop
        oldest = loop.in_flight[0] if loop.in_flight else loop.unsampled
        batch = age_s = None
        if oldest is not None:
            batch, age_s = oldest.batch, self._clock() - max(oldest.launched_s, loop.last_settled_s)
        verdict = self._health.verdict(batch, age_s or 0.0)
        return EngineHealth(
            verdict.reason is None, verdict.reason, num_running, num_waiting, verdict.hopeless, self._health.failing,
            self._sleeping.level,
        )  # fmt: skip

    def metrics(self) -> list[Metric]:
        more = [] if self._more_metrics is None else self._more_metrics()
        return [*self._meter.metrics(), self._sleeping.metric(), *more]

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        return self._meter.activity(self._requests, self._clock(), after_step, after_request, num_cells)

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        self._observers.when_finished.append(call)

    # --- requests -------------------------------------------------------------------------------------------------

    def prepare(
        self, prompt_ids: Several[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        root = cache_root(cache_salt, adapter)
        return prepare(self._scheduler.blocks.cache, self.model.vocab_size, prompt_ids, root, media)

    def submit(self, requests: Several[Request], *, continues: bool = False) -> EngineTokenStream:
        if not self._accepting or self._faults.death.done():
            raise self._stopped()
        self._intake.check(requests)
        queue = self._scheduler.sequences
        if not continues:
            with self._meter.counting_refusals():
                self._admission.check(requests, queue.waiting, len(queue.free_rows))
        sequences = self._intake.sequences(requests)
        stream = self._open(sequences)
        self._deadlines.limit(sequences, continues=continues)
        self._sleeping.used()
        self._meter.submitted(len(requests))
        return stream

    def check_room(self, caller: bytes | None) -> None:
        queue = self._scheduler.sequences
        with self._meter.counting_refusals():
            self._admission.check_caller(caller, queue.waiting, len(queue.free_rows))

    def abort(self, ids: Collection[str] | None = None) -> int:
        return self._requests.abort(ids)

    async def probe(self) -> None:
        while self._accepting and self._requests:  # steps of other requests also prove that the device works
            if await self._probes.next_step(self._faults.death):
                return
        if not self._accepting or self._faults.death.done():
            raise self._stopped()
        params: SamplingParams | PoolingParams = PoolingParams()
        if self.model.generates:
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        probe = Request("health", [0], params, media=self.model.probe_media, is_probe=True)
        async with self._open(self._intake.sequences([probe])) as stream:
            async for (output,) in stream:
                if output.finish is FinishReason.ERROR:
                    raise ProbeFailed(output.error or "the token could not be computed")
                if output.finish is FinishReason.ABORT:
                    raise self._stopped()

    def _open(self, sequences: list[Sequence]) -> EngineTokenStream:
        stream = self._requests.open(sequences)
        requests = [sequence.request for sequence in sequences]
        self._admission.admitted(requests, others_wait=len(self._scheduler.waiting) > len(sequences))
        self.loop.begin()
        return stream

    def _changed(self, sequence: Sequence) -> None:
        if not sequence.request.is_probe:
            self._sleeping.used()
        self.loop.wake()

    def _end_without_adapter(self, key: int, why: str) -> None:
        """End the waiting sequences of adapter `key`, which could not be loaded. `why`: error message of their streams."""
        for sequence in self._requests:
            adapter = sequence.request.adapter
            if adapter is not None and adapter.key == key and sequence.status is SequenceStatus.WAITING:
                self._requests.end(sequence.number, FinishReason.ERROR, why)

    def _stopped(self) -> EngineStopped:
        death = self._faults.death
        return EngineStopped(death.result() if death.done() else "the server is shutting down")

    # --- the engine as a whole ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        self._scheduler.blocks.cache.clear()

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        await self._sleeping.become(level)

    async def wake_up(self) -> None:
        await self._sleeping.become(SleepLevel.AWAKE)

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        await self._profiling.start(path, delay_steps, num_steps)

    async def stop_profile(self) -> Path:
        return await self._profiling.stop()

    async def death(self) -> str:
        return await asyncio.shield(self._faults.death)

    async def drain(self, timeout_s: float) -> int:
        self._accepting = False
        try:
            await asyncio.wait_for(self.loop.idle.wait(), timeout_s)
        except TimeoutError:
            return self._requests.end_all(FinishReason.ABORT)
        return 0

    async def close(self, limit_s: float = CLOSE_LIMIT_S) -> bool:
        await self.drain(0.0)
        await self._profiling.close()
        ended = await self.loop.close(limit_s)
        self._mask_maker.close()
        if self.adapters is not None:
            self.adapters.close()
        return bool(await self.loop.runner.close() and ended)
