"""Start: from an EngineConfig and model files to a running Engine. The composition root below the border.

Everything heavy (importing torch, reading weights, the first steps) happens on a worker thread, on a CPU the one that will
compute, so the event loop answers /health meanwhile."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runtime.admission import AdmissionLimits, Callers
from runtime.api import LoadProgress, ModelInfo, ModelOutline, SleepLevel
from runtime.config import EngineConfig, EnginePlan, PlanError
from runtime.encode.first_items import encode_first
from runtime.engine import Engine
from runtime.fault import WorkerGone
from runtime.features import features_of, takes_embeds
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.lora.adapters import Adapters
from runtime.models.implementation import describe, load
from runtime.models.read.eagle import head_from_config
from runtime.models.registry import add_plugins, mtp_from_config
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.pair import PairSpec
from runtime.models.spec.placement import read_placement
from runtime.models.spec.sharding import Placement, kept_whole, sharded
from runtime.models.spec.stages import keeps_embedding, stages
from runtime.parallel.group import Apart, Group, HostRank, Peers
from runtime.parallel.links import AgreeingRank, LinkPort, StageLinks
from runtime.parallel.messages import Built
from runtime.parallel.processes import RunnersOverProcesses, StageFailed, StageProcesses
from runtime.parallel.replicas import Replicas
from runtime.parallel.runners import RankRunners
from runtime.parallel.stage_runners import StageRunners
from runtime.parallel.stages import Handover, HostStage, Line, TakesTurns
from runtime.platform.platform import Platform, Report, choose_platform
from runtime.profiling.recorder import TorchRecorder
from runtime.runner.rank_worker import RankWorker, on_every_rank
from runtime.runner.worker import Worker
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.speculate.config import HEADS
from runtime.step import Runner
from runtime.weights.fetch import ModelFiles
from runtime.weights.rules import WeightsError
from runtime.weights.sentence_transformers import max_seq_length

if TYPE_CHECKING:
    from runtime.models.expert_load import ExpertLoad
    from runtime.models.model import Model
    from runtime.models.spec.model import ModelSpec

log = logging.getLogger("oneloop.start")

_SAID_BY_STAGES = {each.__name__: each for each in (PlanError, WeightsError, UnsupportedModel)}
_MORE_ADAPTERS_READY = 8  # than there are slots, so that some can come while those in slots are kept


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an Engine is made of, before it lives on a loop."""

    scheduler: Scheduler
    runner: Runner
    model: ModelInfo
    plan: EnginePlan
    adapters: Adapters | None = None
    expert_load: ExpertLoad | None = None


class SharedDevice:
    """What several engines of a process have in common: the thread that computes, or waits for what does, on which their steps take
    turns; and the platform, which plans each one's memory beside what those before it have taken. `first`: the number of the
    device, or of the first of those that share a model out."""

    def __init__(self, first: int = 0, beside: SharedDevice | None = None) -> None:
        """`beside`: has the platform already."""
        self.first = first
        self._beside = beside
        self._worker: Worker | None = None
        self._platform: Platform | None = None
        self._replicas: dict[int, SharedDevice] = {}

    def worker(self) -> Worker:
        """For one engine more; a new one where nobody has the last any more. Needs the running loop."""
        if self._worker is None or not self._worker.num_users:
            self._worker = Worker()
        else:
            self._worker.share()
        return self._worker

    def platform(self, name: str) -> Platform:
        if self._beside is not None:
            return self._beside.platform(name)
        if self._platform is None:
            self._platform = choose_platform(name)
        return self._platform

    def of_replica(self, number: int, size: int) -> SharedDevice:
        """Where replica `number` of a model computes, of which each has `size` devices."""
        if not number:
            return self
        return self._replicas.setdefault(number, SharedDevice(self.first + number * size, self))


async def start_replicas(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None = None,
    device: SharedDevice | None = None, processes: StageProcesses | None = None,
) -> Engine | Replicas:  # fmt: skip
    """As many engines of the model as `config` says, as one. Arguments and errors as of `start_engine`.

    The first is there before the others begin: what it has compiled they find."""
    num, device = config.data_parallel_size, device or SharedDevice()
    if num == 1:
        return await start_engine(config, files, report, draft, device, processes=processes)
    callers = Callers()
    config = replace(
        config,
        cache_key=os.urandom(32),
        max_queue=math.ceil(config.max_queue / num),
        max_queued_tokens=config.max_queued_tokens and math.ceil(config.max_queued_tokens / num),
    )

    async def replica(number: int, report: Report) -> Engine:
        place = device.of_replica(number, config.num_devices)
        seed = None if config.seed is None else config.seed + number
        engine = await start_engine(config, files, report, draft, place, callers=callers, seed=seed)
        log.info("replica %d of %d is ready", number + 1, num)
        return engine

    engines = [await replica(0, report)]
    others = await asyncio.gather(
        *(replica(number, lambda progress: None) for number in range(1, num)), return_exceptions=True
    )
    engines += [each for each in others if isinstance(each, Engine)]
    if errors := [each for each in others if isinstance(each, BaseException)]:
        await asyncio.gather(*(each.close() for each in engines))
        raise errors[0]
    return Replicas(engines)


async def start_engine(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None = None,
    device: SharedDevice | None = None, *, callers: Callers | None = None, seed: int | None = None,
    processes: StageProcesses | None = None,
) -> Engine:  # fmt: skip
    """`report` is called from the worker thread, or from the loop. `draft`: files of the draft model, where the options name one.
    `device`: that of other engines, if this one shares it. `callers`: of all engines whose limits for a caller are the same ones;
    `seed`: in the place of the options'. `processes`: of the other stages, where each has one of its own.

    Raises PlanError where options do not fit, WeightsError and UnsupportedModel where the model does not."""
    place = device or SharedDevice()
    if (processes is None) is config.stages_apart:
        raise PlanError(
            "--distributed-executor-backend ray is for the server alone, and for one model of several stages"
        )
    if processes is None:
        parts = await _built(config, files, _timed(report), draft, place)
    else:
        parts = await _built_over_processes(config, files, _timed(report), place, processes)
    num_devices = config.tensor_parallel_size * config.num_stages_here
    topology = place.platform(config.device).topology(range(place.first, place.first + num_devices))
    engine = Engine(
        parts.scheduler,
        parts.runner,
        replace(parts.model, topology=topology),
        admission=AdmissionLimits(
            config.max_queue,
            config.max_queued_tokens,
            config.max_num_seqs_per_key,
            config.max_tokens_per_minute_per_key,
            config.max_queue_time,
        ),
        steps_in_flight=parts.plan.steps_in_flight,
        stream_interval=config.stream_interval,
        seed=config.seed if seed is None else seed,
        recorder=partial(TorchRecorder, parts.model.device),
        bed=None if processes is not None else ModelBed(config, files, draft, parts, device),
        sleep_after_s=config.sleep_after,
        adapters=parts.adapters,
        callers=callers,
        more_metrics=None if parts.expert_load is None else parts.expert_load.metrics,
    )
    if processes is not None:
        processes.when_lost(engine.lose)
    return engine


async def _built(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None, device: SharedDevice
) -> EngineParts:
    if config.num_devices > 1:
        return await _built_on_ranks(config, files, report, draft, device)
    worker = device.worker()
    try:
        running = await worker.run(lambda: _build(config, files, worker, report, draft, device))
        await _encode_first(running, device.platform(config.device), report)
        parts = await worker.run(lambda: running.assembled(config.cache_key))
        return replace(parts, expert_load=_expert_load(config, [running.model]))
    except BaseException:
        await worker.close()
        raise


class _OwnRanks:
    """The ranks of the stages that this process computes: all of a model's, or one, which `links` connect to the others. Each has a
    thread of its own, on which it loads its part and computes that of every step."""

    def __init__(
        self, config: EngineConfig, first: int, numbers: Sequence[int], links: StageLinks | None = None
    ) -> None:
        """`first`: the number of the first rank's device; `numbers`: of the stages."""
        self.size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self._groups = [Group(self.size) for _ in numbers]
        self._everyone = Group(self.size * len(numbers))
        self.lines = [Line(num_stages) for _ in range(self.size)] if num_stages > 1 else []
        self._links = links
        self.by_stage = [
            [self._worker(group, stage, number, first + place * self.size + number) for number in range(self.size)]
            for place, (stage, group) in enumerate(zip(numbers, self._groups, strict=True))
        ]
        self._first = first
        self.workers = [worker for stage in self.by_stage for worker in stage]

    def _worker(self, group: Group, stage: int, number: int, device: int) -> RankWorker:
        line, ways = self.lines[number] if self.lines else None, None
        if self._links is not None:
            rank: HostRank = AgreeingRank(group, number, device, self._links.agreement)
            ways = self._links.ways[number]
        elif line is not None:
            rank = HostRank(group, number, device, HostRank(self._everyone, stage * self.size + number))
        else:
            rank = HostRank(group, number, device)
        return RankWorker(rank, line, stage, ways)

    async def build(
        self, config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None, device: SharedDevice
    ) -> list[list[Running]]:
        """By stage, and there by rank."""
        workers = self.workers

        def rank(planned: Planned, worker: RankWorker) -> Running:
            reports = report if worker is workers[0] else lambda progress: None
            return _running(planned, files, worker, reports, draft, worker.rank)

        planned = await workers[0].run(lambda: plan_engine(config, files, report, draft, device))
        planned.platform.compile_ahead(planned.plan)
        every = await on_every_rank(workers, lambda worker: rank(planned, worker))
        return [every[first : first + self.size] for first in range(0, len(every), self.size)]

    def runners(self, ranks: Sequence[Sequence[Running]]) -> list[Runner]:
        """By stage."""
        return [
            each[0].runner if self.size == 1 else RankRunners([one.runner for one in each], group.end)
            for each, group in zip(ranks, self._groups, strict=True)
        ]

    @property
    def stages(self) -> list[list[HostStage]]:
        """By stage, those of each line."""
        return [[worker.stage for worker in stage if worker.stage is not None] for stage in self.by_stage]

    def end(self) -> None:
        """Whoever waits for another rank or stage fails."""
        for group in (*self._groups, self._everyone):
            group.end()
        for line in self.lines:
            line.end()

    async def close(self) -> None:
        self.end()
        await asyncio.gather(*(worker.close() for worker in self.workers))


async def _built_on_ranks(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None, device: SharedDevice
) -> EngineParts:
    """All ranks of all stages are threads of this process."""
    own = _OwnRanks(config, device.first, range(config.pipeline_parallel_size))
    try:
        ranks = await own.build(config, files, report, draft, device)
        runners = own.runners(ranks)
        running = ranks[-1][0]._replace(runner=runners[0])
        if len(runners) > 1:
            stages = StageRunners(runners, own.stages, own.lines, running.plan.steps_in_flight, own.end)
            running = running._replace(runner=stages)
        await _encode_first(running, device.platform(config.device), report)
    except BaseException:
        await own.close()
        raise
    shards, every = [each.model for each in ranks[-1]], [each for stage in ranks for each in stage]
    parts = running.assembled(config.cache_key, shards)
    facts = replace(
        parts.model,
        weights_bytes=sum(each.model.weights_bytes for each in every),
        kv_cache_bytes=parts.model.kv_cache_bytes * len(every),
    )
    return replace(parts, model=facts, expert_load=_expert_load(config, [stage[0].model for stage in ranks]))


def _expert_load(config: EngineConfig, models: Sequence[Model]) -> ExpertLoad | None:
    """`models`: of the first rank of each stage, whose routers see what all others' do."""
    if not config.enable_expert_distribution_metrics:
        return None
    from runtime.models.expert_load import ExpertLoad
    from runtime.models.pair import ModelPair

    counts = [getattr(each.model if isinstance(each, ModelPair) else each, "expert_counts", {}) for each in models]
    return ExpertLoad(counts, config.tensor_parallel_size if config.enable_expert_parallel else 1)


async def _built_over_processes(
    config: EngineConfig, files: ModelFiles, report: Report, device: SharedDevice, processes: StageProcesses
) -> EngineParts:
    """The first stage is this process', whose loop is in charge; each of the others has a process of its own.

    Raises PlanError where one of them has ended."""
    num_stages = config.pipeline_parallel_size
    port = LinkPort(processes.host, processes.secret)
    own: _OwnRanks | None = None
    theirs: asyncio.Task[list[Built]] | None = None
    try:
        await processes.begin(num_stages)
        theirs = asyncio.create_task(processes.build(config, port.address))
        theirs.add_done_callback(lambda task: port.close() if task.cancelled() or task.exception() else None)
        try:
            own, (ranks,) = await build_stage(config, files, report, device, 0, port, processes.addresses(port.address))
        except (Apart, OSError):
            await theirs  # says why, if anybody does
            raise
        built = await theirs
        (runner,) = own.runners([ranks])
    except BaseException as error:
        port.close()
        if theirs is not None:
            theirs.cancel()
        if own is not None:
            await own.close()
        await processes.close()
        if isinstance(error, StageFailed | WorkerGone | OSError):
            raise _of_stages(error) from error
        raise

    def end() -> None:
        own.end()
        port.close()

    far, plan, first = processes.runners(runner), built[-1].plan, ranks[0]
    stages: list[Sequence[TakesTurns]] = [own.stages[0], *([each.stage] * own.size for each in far)]
    runner = RunnersOverProcesses(processes, [runner, *far], stages, own.lines, plan.steps_in_flight, end)
    parts = Running(plan, first.model, first.eos_token_ids, runner).assembled(config.cache_key)
    facts = replace(
        built[-1].model,
        weights_bytes=sum(each.model.weights_bytes for each in ranks) + sum(each.weights_bytes for each in built),
        kv_cache_bytes=first.plan.kv_cache_bytes * len(ranks) + sum(each.kv_cache_bytes for each in built),
    )
    return replace(parts, model=facts)


def _of_stages(error: BaseException) -> Exception:
    """What starting raises, for what another process has said."""
    if isinstance(error, StageFailed) and error.kind in _SAID_BY_STAGES:
        return _SAID_BY_STAGES[error.kind](str(error))
    where = ", ".join(getattr(error, "__notes__", ()))
    return PlanError(f"the stages of the model could not be started: {error}" + (where and f" ({where})"))


async def build_stage(
    config: EngineConfig, files: ModelFiles, report: Report, device: SharedDevice, stage: int, port: LinkPort,
    addresses: Sequence[tuple[str, int]],
) -> tuple[_OwnRanks, list[list[Running]]]:  # fmt: skip
    """The ranks of stage number `stage`, the one that this process computes, connected to all others, which listen at `addresses`;
    and what they have built. Raises what `start_engine` does, Apart where another one has failed, and OSError."""
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    links = await asyncio.to_thread(port.connected, stage, num_stages, size, addresses)
    own = _OwnRanks(config, device.first, [stage], links)
    try:
        return own, await own.build(config, files, report, None, device)
    except BaseException:
        port.close()
        await own.close()
        raise


def built_stage(ranks: Sequence[Running]) -> Built:
    """What the other processes are told of it."""
    plan, model, eos_token_ids, _ = ranks[0]
    return Built(
        plan,
        _model_info(plan, model, eos_token_ids),
        sum(each.model.weights_bytes for each in ranks),
        plan.kv_cache_bytes * len(ranks),
    )


class ModelBed:
    """A `sleeping.Bed`: a runner is built as the first one was, with the rows and blocks that this one came to."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        draft: ModelFiles | None,
        parts: EngineParts,
        device: SharedDevice | None,
    ) -> None:
        self._device = device
        self._files = files
        self._draft = draft
        self._model, self._adapters, plan = parts.model, parts.adapters, parts.plan
        self._expert_load = parts.expert_load
        self._config = replace(
            config,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            num_kv_blocks=plan.num_kv_blocks,
            kv_cache_bytes=None,
        )

    async def build(self) -> Runner:
        """Raises PlanError, WeightsError or UnsupportedModel: other files stand there now, or memory has been taken."""
        device = self._device or SharedDevice()
        parts = await _built(self._config, self._files, _timed(lambda progress: None), self._draft, device)
        if parts.model != self._model:
            await parts.runner.close()
            raise WeightsError(f"the files of {self._files.name} are another model's than when it was loaded")
        if self._adapters is not None:
            assert parts.adapters is not None, "it is built as the first was"
            self._adapters.awake(parts.adapters)
        if self._expert_load is not None:
            assert parts.expert_load is not None, "it is built as the first was"
            self._expert_load.awake(parts.expert_load)
        return parts.runner

    async def release(self, level: SleepLevel) -> None:
        if self._adapters is not None:
            self._adapters.sleep()
        await asyncio.to_thread(self._release, level)

    def _release(self, level: SleepLevel) -> None:
        frozen = gc.get_freeze_count()
        if frozen:  # what was loaded is left out of collections; now some of it shall go
            gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
        choose_platform(self._config.device).release_memory()
        if level is SleepLevel.DROPPED:
            for files in filter(None, (self._files, self._draft)):
                files.leave_memory()


def _timed(report: Report) -> Report:
    """Logs how long each phase took when the next one begins."""
    began_s, running = time.monotonic(), ""

    def timed(progress: LoadProgress) -> None:
        nonlocal began_s, running
        if progress.phase != running:
            now = time.monotonic()
            if running:
                log.info("%s: %.1f s", running, now - began_s)
            began_s, running = now, progress.phase
        report(progress)

    return timed


@dataclass(frozen=True, slots=True)
class Planned:
    """What is known before anything is loaded."""

    config: EngineConfig  # with what the model's files add
    spec: ModelSpec  # of the largest part, where there are several
    whole: ModelSpec
    platform: Platform
    plan: EnginePlan
    weights_bytes: int

    def kernels(self) -> list[str]:
        """A line for each operation: what computes it in the usual case, and why nothing faster does."""
        import ops

        return ops.describe()


def outline_model(config: EngineConfig, files: ModelFiles) -> ModelOutline:
    """By its configuration alone: nothing of its weights is read. Raises UnsupportedModel."""
    add_plugins(config.model_plugins)
    spec = describe(files.config, config.model_impl, files.modules)
    return ModelOutline(
        architecture=spec.architecture,
        max_model_len=_with_length(config, spec, files).max_model_len or spec.max_model_len,
        pooler=spec.pooler_info,
        generates=spec.generates,
        modalities=frozenset() if spec.encoder is None else spec.encoder.modalities,
    )


def plan_engine(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None = None,
    device: SharedDevice | None = None,
) -> Planned:  # fmt: skip
    """Which model it is, on what it will run, and what the options come to there; imports torch, loads nothing.

    Raises PlanError where options do not fit, UnsupportedModel where the model cannot be served."""
    add_plugins(config.model_plugins)
    spec = describe(files.config, config.model_impl, files.modules)  # what cannot be served is said before loading
    spec = _with_draft(config, spec, files, draft)
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise PlanError("--enable-expert-parallel shares experts out over devices: add --tensor-parallel-size")
    if config.expert_placement is not None and not config.enable_expert_parallel:
        raise PlanError("--expert-placement says which device has which experts: add --enable-expert-parallel")
    described = spec.model if isinstance(spec, PairSpec) else spec
    has_experts = isinstance(described, DecoderSpec) and any(True for _ in described.experts())
    if config.enable_expert_distribution_metrics and not has_experts:
        raise PlanError(
            f"{spec.architecture} has no experts that are counted: leave --enable-expert-distribution-metrics out"
        )
    whole, whole_bytes = spec, spec.weights_bytes("float32")
    if config.pipeline_layers is not None and config.pipeline_parallel_size == 1:
        raise PlanError("--pipeline-layers says how many layers each stage has: add --pipeline-parallel-size")
    if config.num_devices > 1:
        _refuse_stages(config)
        # Shards of a stage are all of a size, and the largest stage is the one to be planned for.
        parts = parts_of(config, spec, 0)
        spec = max(parts, key=lambda part: part.weights_bytes("float32"))
        described = spec.model if isinstance(spec, PairSpec) else spec
        assert isinstance(described, DecoderSpec), "others are not cut"
        for kind in sorted(kept_whole(described)):
            log.info("layers of the kind %s are computed whole on every device", kind)
    config = _with_length(config, spec, files)
    report(LoadProgress("import"))
    device = device or SharedDevice()
    platform = device.platform(config.device)
    platform.force_kernels(config)
    platform.refuse(config)
    if device.first:  # a thread begins with the first device
        platform.use(device.first)
    stored_bytes = None
    if config.load_format != "dummy":
        stored_bytes = sum(each.stored_bytes for each in (files, draft) if each)
        if config.num_devices > 1:
            stored_bytes = stored_bytes * spec.weights_bytes("float32") // whole_bytes
    weights_bytes = platform.weights_bytes(config, spec, stored_bytes)
    return Planned(config, spec, whole, platform, platform.plan(config, spec, stored_bytes), weights_bytes)


def parts_of(config: EngineConfig, spec: ModelSpec, number: int) -> tuple[DecoderSpec | PairSpec, ...]:
    """What rank `number` of each stage computes: of a draft model or head, which stands beside the last stage, all.

    Raises UnsupportedModel, or PlanError for a placement of experts that is none."""
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    described, draft = (spec.model, spec.draft) if isinstance(spec, PairSpec) else (spec, None)
    if not isinstance(described, DecoderSpec):
        raise UnsupportedModel(
            f"{spec.architecture} cannot be cut for {config.num_devices} devices: it runs through transformers"
        )
    if draft is not None and config.stages_apart:
        raise UnsupportedModel(
            f"{spec.architecture} cannot be cut into processes: a draft model or head stands beside it"
        )
    whole = described.whole
    if num_stages > 1 and not whole.generates:
        raise UnsupportedModel(f"{spec.architecture} makes vectors of whole texts, which are not cut into stages")
    placement = None
    if config.enable_expert_parallel:
        if not any(True for _ in whole.experts()):
            raise PlanError(f"{spec.architecture} has no experts: leave --enable-expert-parallel out")
        placement = _placement(config, len(whole.layers))
    *first, last = stages(sharded(whole, number, size, placement), num_stages, config.pipeline_layers, draft)
    return (*first, last if draft is None else PairSpec(last, draft))


def _placement(config: EngineConfig, num_layers: int) -> Placement:
    if config.expert_placement is None:
        return Placement()
    try:
        return read_placement(Path(config.expert_placement), num_layers, config.tensor_parallel_size)
    except (OSError, ValueError) as error:
        raise PlanError(f"expert-placement {config.expert_placement}: {error}") from error


def _refuse_stages(config: EngineConfig) -> None:
    if config.pipeline_parallel_size == 1:
        return
    for option, is_on in (("enable-lora", config.enable_lora), ("enable-prompt-embeds", config.enable_prompt_embeds)):
        if is_on:
            raise PlanError(
                f"--{option} is not for a model in several stages: leave it or --pipeline-parallel-size alone"
            )


def _with_draft(config: EngineConfig, spec: ModelSpec, files: ModelFiles, draft: ModelFiles | None) -> ModelSpec:
    named = config.speculation is not None and config.speculation.model is not None
    if named != (draft is not None):
        raise PlanError("a draft model has to be named by the speculative config, and its files to be there")
    method = "" if config.speculation is None else config.speculation.method
    if method in HEADS:
        described = _described(spec, method)
        read = mtp_from_config if method == "mtp" else partial(head_from_config, method)
        return PairSpec.with_head(described, read((draft or files).config, described))
    if draft is None:
        return spec
    pair = PairSpec.of(spec, describe(draft.config, config.model_impl))
    if pair.max_model_len < min(spec.max_model_len, config.max_model_len or spec.max_model_len):
        if config.max_model_len is not None:
            raise PlanError(
                f"--max-model-len {config.max_model_len} is more than the draft model's {pair.max_model_len}: lower it, or take "
                "another draft model"
            )
        log.info(
            "max-model-len is %d, the draft model's, and not the model's %d", pair.max_model_len, spec.max_model_len
        )
    return pair


def _described(spec: ModelSpec, method: str) -> DecoderSpec:
    """`spec`, of which a draft head may read hidden states. Raises UnsupportedModel."""
    if not isinstance(spec, DecoderSpec):
        raise UnsupportedModel(f"{spec.architecture} runs through transformers, where no method {method} is served")
    return spec


def _build(
    config: EngineConfig, files: ModelFiles, worker: Worker, report: Report, draft: ModelFiles | None,
    device: SharedDevice,
) -> Running:  # fmt: skip
    planned = plan_engine(config, files, report, draft, device)
    planned.platform.compile_ahead(planned.plan)
    return _running(planned, files, worker, report, draft)


async def _encode_first(running: Running, platform: Platform, report: Report) -> None:
    plan, model = running.plan, running.model
    if model.encoder is None:
        return
    from runtime.runner.warmup import prompts

    try:
        if not (items := await asyncio.to_thread(platform.first_items, model.encoder, plan)):
            return
        num = min(len(items[0][0].positions), plan.max_num_batched_tokens, plan.max_model_len - 2)
        prompt = (
            prompts([num], plan.layout, plan.num_kv_blocks)
            if model.spec.generates and not plan.layout.in_one_step
            else None
        )
        await encode_first(running.runner, items, prompt, report)
    except Exception:  # a device that is lost says so again when somebody comes
        log.warning(
            "encoders could not be tried at start: the first that they are given may take longer", exc_info=True
        )


class Running(NamedTuple):
    """A model that has computed its first steps."""

    plan: EnginePlan
    model: Model
    eos_token_ids: frozenset[int]
    runner: Runner

    def assembled(self, cache_key: bytes | None, shards: Sequence[Model] = ()) -> EngineParts:
        """`shards`: the models of all ranks, where `model` is the first one's."""
        import ops

        parts = assemble(*self, cache_key=cache_key, shards=shards)
        for line in (*ops.describe(usual=False), *self.plan.notes):
            log.info(line)
        return parts


def _running(
    planned: Planned, files: ModelFiles, worker: Worker, report: Report, draft: ModelFiles | None,
    rank: HostRank | None = None,
) -> Running:  # fmt: skip
    """Load and warm up, on the thread that will compute. `rank`: whose shard of the model it is."""
    platform = planned.platform
    with platform.out_of_memory_is("the model needs a larger device, or a smaller dtype"):
        peers = None if rank is None else platform.join(rank)
        if rank is not None:
            assert isinstance(worker, RankWorker)
            planned = _of_rank(planned, worker)
        model = _loaded(planned, files, report, draft, peers, worker.stage if isinstance(worker, RankWorker) else None)
    eos_token_ids = files.eos_token_ids | planned.config.end_token_ids
    report(LoadProgress("warm-up"))
    runner, plan = platform.build_runner(planned.config, planned.plan, model, eos_token_ids, worker, report)
    return Running(plan, model, eos_token_ids, runner)


def _of_rank(planned: Planned, worker: RankWorker) -> Planned:
    """What is known of the part that a rank computes, which has joined; and its stage, if there are several, begins."""
    spec, plan = parts_of(planned.config, planned.whole, worker.rank.number)[worker.number], planned.plan
    if worker.ways is not None:  # others have planned by the memory of their hosts
        num_blocks, max_model_len = map(worker.rank.least, (plan.num_kv_blocks, plan.max_model_len))
        plan = replace(plan, num_kv_blocks=num_blocks, max_model_len=max_model_len)
    plan = plan.for_layers(spec.memory_kinds())
    if worker.line is not None:
        described = spec.model if isinstance(spec, PairSpec) else spec
        assert isinstance(described, DecoderSpec), "others are not cut"
        num_tensors = 3 if keeps_embedding(described.all_layers) else 2
        worker.stage = planned.platform.stage(
            worker.line, worker.number, num_tensors, described.hidden_size, plan, worker.ways
        )
    return replace(planned, spec=spec, plan=plan)


def _loaded(
    planned: Planned, files: ModelFiles, report: Report, draft: ModelFiles | None, peers: Peers | None = None,
    stage: Handover | None = None,
) -> Model:  # fmt: skip
    """The model, and the draft model where there is one: kept alike, for contexts of the same length."""
    from runtime.models.adapters import AdapterRoom
    from runtime.models.decoder import Decoder
    from runtime.models.load import load_draft_head

    config, spec, plan = planned.config, planned.spec, planned.plan
    room = None
    if (lora := plan.lora) is not None:
        num_ready = min(lora.max_cpu_loras, lora.max_loras + _MORE_ADAPTERS_READY)
        room = AdapterRoom(lora.max_loras, lora.max_lora_rank, num_ready, lora.lora_experts, lora.lora_vocabulary)

    def loaded(
        spec: ModelSpec, files: ModelFiles, load_format: str, room: AdapterRoom | None = None, *, whole: bool = False
    ) -> Model:
        return load(
            spec,
            files,
            dtype=plan.dtype,
            load_format=load_format,
            seed=config.seed or 0,
            progress=report,
            max_model_len=plan.max_model_len,
            device=planned.platform.device,
            weights=plan.weights,
            adapters=room,
            peers=peers if peers is not None and peers.size > 1 and not whole else None,
            stage=None if whole else stage,
            counts_experts=config.enable_expert_distribution_metrics and not whole,
        )

    if not isinstance(spec, PairSpec):
        return loaded(spec, files, config.load_format, room)
    from runtime.models.pair import ModelPair

    model = loaded(spec.model, files, config.load_format, room)
    load_format = config.load_format if draft is None or config.load_format == "dummy" else "auto"
    if isinstance(spec.draft, DraftHeadSpec):
        assert isinstance(model, Decoder), "others have no draft heads"
        head = load_draft_head(
            spec.draft, draft or files, model, load_format=load_format, seed=config.seed or 0, progress=report,
            max_model_len=plan.max_model_len, weights=plan.weights,
        )  # fmt: skip
        return ModelPair(model, head)
    assert draft is not None
    return ModelPair(model, loaded(spec.draft, draft, load_format, whole=True))


def _with_length(config: EngineConfig, spec: ModelSpec, files: ModelFiles) -> EngineConfig:
    """Limit texts to be pooled to the length that sentence-transformers cuts them to, unless `config` has another."""
    if files.modules is not None:
        length = files.modules.max_seq_length
    else:
        length = None if spec.generates or files.gguf is not None else max_seq_length(files.path)
    if config.max_model_len is not None or length is None or length >= spec.max_model_len:
        return config
    return replace(config, max_model_len=length)


def assemble(
    plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], runner: Runner, cache_key: bytes | None = None,
    shards: Sequence[Model] = (),
) -> EngineParts:  # fmt: skip
    """Books and facts around a runner. `cache_key`: as `EngineConfig` has it. `shards`: as `Running.assembled` has them."""
    limits = SchedulerLimits(
        plan.max_num_seqs, plan.max_num_batched_tokens, eos_token_ids, in_one_step=plan.layout.in_one_step
    )
    prefixes = PrefixCache(plan.layout.block_size, plan.enable_prefix_caching, plan.layout.groups, cache_key)
    adapters = _adapters(plan, model, shards or [model])
    scheduler = Scheduler(
        limits, BlockPool(plan.num_kv_blocks), prefixes, plan.policy(), step_budget=plan.step_budget(),
        features=features_of(plan, model, adapters),
    )  # fmt: skip
    return EngineParts(scheduler, runner, _model_info(plan, model, eos_token_ids), plan, adapters)


def _adapters(plan: EnginePlan, model: Model, shards: Sequence[Model]) -> Adapters | None:
    if plan.lora is None or model.adapters is None:
        return None
    from runtime.lora.store import AdapterStore
    from runtime.lora.targets import targets_of

    spec = model.spec.model if isinstance(model.spec, PairSpec) else model.spec
    assert isinstance(spec, DecoderSpec), "others have no room for adapters"
    whole = spec if spec.shard_of is None else spec.shard_of.whole
    rooms = [shard.adapters for shard in shards if shard.adapters is not None]
    targets = targets_of(whole, experts=model.adapters.has_experts, vocabulary=model.adapters.has_vocabulary)
    return Adapters(plan.lora, AdapterStore(rooms, targets, plan.lora.max_lora_rank))


def _model_info(plan: EnginePlan, model: Model, eos_token_ids: frozenset[int]) -> ModelInfo:
    return ModelInfo(
        architecture=model.spec.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=model.dtype,
        device=model.device,
        num_parameters=model.num_parameters,
        weights_bytes=model.weights_bytes,
        num_kv_blocks=plan.num_kv_blocks,
        kv_block_size=plan.layout.block_size,
        kv_cache_bytes=plan.kv_cache_bytes,
        kv_cache_note=plan.kv_cache_note,
        max_concurrency=plan.max_concurrency,
        prefix_caching=plan.enable_prefix_caching,
        max_num_seqs=plan.max_num_seqs,
        pooler=model.spec.pooler_info,
        generates=model.spec.generates,
        speculative="" if plan.speculative is None else str(plan.speculative),
        reads_predictions=plan.speculative is not None and plan.speculative.reads_predictions,
        modalities=frozenset() if model.encoder is None else model.encoder.spec.modalities,
        takes_embeds=takes_embeds(plan, model),
    )
