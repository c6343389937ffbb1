"""Start of an Engine, or of several engines combined in one client, from an EngineConfig and model files."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from runtime.config import EngineConfig, PlanError
from runtime.engine import Engine
from runtime.engine.admission import AdmissionLimits, Callers
from runtime.parallel.processes import StageProcesses
from runtime.parallel.replicas import Replicas
from runtime.platform.platform import Report
from runtime.profiling.recorder import TorchRecorder
from runtime.start.build import timed
from runtime.start.plan import SharedDevice
from runtime.start.ranks import build_parts
from runtime.start.sleep import ModelRunnerFactory
from runtime.start.stages import build_over_processes
from runtime.tiers.folder import fingerprint, folder_key
from runtime.weights.fetch import ModelFiles

log = logging.getLogger("oneloop.start")


async def start_replicas(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None = None,
    device: SharedDevice | None = None, processes: StageProcesses | None = None,
) -> Engine | Replicas:  # fmt: skip
    """Start `config.data_parallel_size` engines of the model as one client. Arguments and errors: see `start_engine`.

    The first engine starts before the others, which then find its compiled kernels in the cache."""
    num, device = config.data_parallel_size, device or SharedDevice()
    config = await asyncio.to_thread(_with_folder, config, files, draft)
    if num == 1:
        return await start_engine(config, files, report, draft, device, processes=processes)
    callers = Callers()
    config = replace(
        config,
        cache_key=config.cache_key or os.urandom(32),
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


def _with_folder(config: EngineConfig, files: ModelFiles, draft: ModelFiles | None) -> EngineConfig:
    """Return the config with the keys for KV blocks on disk, if --kv-disk is set. Raises PlanError."""
    if config.kv_disk is None:
        return config
    try:
        key = folder_key(Path(config.kv_disk))
    except (OSError, ValueError) as error:
        raise PlanError(f"--kv-disk {config.kv_disk}: {error}") from error
    load = f"{config.load_format} {config.seed}" if config.load_format == "dummy" else ""
    return replace(config, cache_key=key, kv_fingerprint=fingerprint(files, draft, load))


async def start_engine(
    config: EngineConfig, files: ModelFiles, report: Report, draft: ModelFiles | None = None,
    device: SharedDevice | None = None, *, callers: Callers | None = None, seed: int | None = None,
    processes: StageProcesses | None = None,
) -> Engine:  # fmt: skip
    """Start one engine. `report` is called from the worker thread or the event loop.

    `draft`: files of the draft model, if options name one. `device`: device shared with other engines. `callers`: per-caller
    limits shared by several engines. `seed`: replaces the option's value. `processes`: processes of the other pipeline stages.

    Raises PlanError if the options do not fit, or WeightsError or UnsupportedModel if the model cannot be served."""
    place = device or SharedDevice()
    if (processes is None) is config.stages_apart:
        raise PlanError(
            "--distributed-executor-backend ray requires oneloop serve, one model and --pipeline-parallel-size"
        )
    if processes is None:
        parts = await build_parts(config, files, timed(report), draft, place)
    else:
        parts = await build_over_processes(config, files, timed(report), place, processes)
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
        runner_factory=None if processes is not None else ModelRunnerFactory(config, files, draft, parts, device),
        sleep_after_s=config.sleep_after,
        adapters=parts.adapters,
        callers=callers,
        more_metrics=None if parts.expert_load is None else parts.expert_load.metrics,
    )
    if processes is not None:
        processes.when_lost(engine.loop.lose)
    return engine
