"""Start: from an EngineConfig and model files to a running Engine. The composition root below the border.

Everything heavy (importing torch, reading weights, the first steps) happens on a worker thread, on a CPU the one that will
compute, so the event loop answers /health meanwhile."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.api import LoadProgress, ModelInfo
from runtime.config import EngineConfig, EnginePlan, PlanError
from runtime.engine import Engine
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.models.implementation import describe, load
from runtime.models.registry import add_plugins
from runtime.runner.worker import Worker
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.step import Runner
from runtime.weights.fetch import ModelFiles

if TYPE_CHECKING:
    from runtime.models.model import Model

log = logging.getLogger("oneloop.start")

Report = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an Engine is made of, before it lives on a loop."""

    scheduler: Scheduler
    runner: Runner
    model: ModelInfo


async def start_engine(config: EngineConfig, files: ModelFiles, report: Report) -> Engine:
    """`report` is called from the worker thread.

    Raises PlanError where options do not fit, WeightsError and UnsupportedModel where the model does not."""
    worker = Worker()
    try:
        parts = await worker.run(lambda: _build(config, files, worker, _timed(report)))
    except BaseException:
        await worker.close()
        raise
    return Engine(
        parts.scheduler,
        parts.runner,
        parts.model,
        max_queue=config.max_queue,
        steps_in_flight=config.steps_in_flight,
        seed=config.seed,
    )


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


def _build(config: EngineConfig, files: ModelFiles, worker: Worker, report: Report) -> EngineParts:
    add_plugins(config.model_plugins)
    spec = describe(files.config, config.model_impl)  # what cannot be served is said before anything is loaded
    report(LoadProgress("import"))
    device = choose_device(config.device)
    if device == "cuda" and config.kernels == "native":
        raise PlanError("kernels native are for the CPU; use --device cpu, or leave --kernels alone")
    import ops
    from runtime.runner import on_cpu, on_cuda

    ops.force(None if config.kernels == "auto" else config.kernels)
    backend = None if config.attention_backend == "auto" else config.attention_backend
    for op in ("attend", "paged_attention"):
        ops.force(backend if device == "cuda" else None, op)
    ops.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    stored_bytes = None if config.load_format == "dummy" else files.stored_bytes
    plan = on_cuda.plan(config, spec) if device == "cuda" else on_cpu.plan(config, spec, stored_bytes)
    if device == "cuda":
        on_cuda.compile_ahead(plan)
    with on_cuda.out_of_memory_is("the model needs a larger device, or a smaller dtype"):
        model = load(
            spec,
            files,
            dtype=plan.dtype,
            load_format=config.load_format,
            seed=config.seed or 0,
            progress=report,
            max_model_len=plan.max_model_len,
            device=device,
            weights=plan.weights,
        )
    eos_token_ids = files.eos_token_ids | config.end_token_ids
    report(LoadProgress("warm-up"))
    if device == "cuda":
        runner, plan = on_cuda.build_runner(config, plan, model, eos_token_ids, report)
        parts = assemble(plan, model, eos_token_ids, runner)
    else:
        cpu_runner = on_cpu.build_runner(plan, model, eos_token_ids, worker)
        on_cpu.warm_up(cpu_runner, plan)
        parts = assemble(plan, model, eos_token_ids, cpu_runner)
    report(LoadProgress("ready"))
    for line in (*ops.describe(usual=False), *plan.notes):
        log.info(line)
    return parts


def choose_device(wanted: str) -> str:
    """ "cpu" or "cuda". Raises PlanError where there is no such device."""
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise PlanError(f"device cuda cannot be used: {why}; use --device cpu")
    return "cpu"


def assemble(plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], runner: Runner) -> EngineParts:
    """Books and facts around a runner."""
    limits = SchedulerLimits(plan.max_num_seqs, plan.max_num_batched_tokens, eos_token_ids, plan.max_num_mixed_tokens)
    prefixes = PrefixCache(plan.layout.block_size, plan.enable_prefix_caching, plan.layout.groups)
    scheduler = Scheduler(limits, BlockPool(plan.num_kv_blocks), prefixes, plan.policy)
    return EngineParts(scheduler, runner, _model_info(plan, model, eos_token_ids))


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
        most_long_sequences=plan.most_long_sequences,
        prefix_caching=plan.enable_prefix_caching,
        max_num_seqs=plan.max_num_seqs,
    )
