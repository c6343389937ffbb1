"""Start: from an EngineConfig and model files to a running Engine. The composition root below the border.

Everything heavy (importing torch, reading weights, the first step) happens on the worker thread that will compute, so the
event loop answers /health meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from runtime.api import LoadProgress, ModelInfo
from runtime.config import CPU, ELEMENT_BYTES, EngineConfig, EnginePlan, PlanError
from runtime.engine import Engine
from runtime.kv.block_pool import BlockPool
from runtime.kv.layout import BLOCK_SIZE, LayerShape
from runtime.kv.prefix_cache import PrefixCache
from runtime.models.registry import spec_from_config
from runtime.models.spec import DecoderSpec
from runtime.runner.memory import free_host_bytes
from runtime.runner.worker import Worker
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.weights.fetch import ModelFiles

if TYPE_CHECKING:
    from runtime.models.decoder import Decoder
    from runtime.runner.model_runner import ModelRunner

log = logging.getLogger("oneloop.start")

Report = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an Engine is made of, before it lives on a loop."""

    scheduler: Scheduler
    runner: ModelRunner
    model: ModelInfo


async def start_engine(config: EngineConfig, files: ModelFiles, report: Report) -> Engine:
    """`report` is called from the worker thread.

    Raises PlanError where options do not fit, WeightsError and UnsupportedModel where the model does not."""
    worker = Worker()
    try:
        parts = await worker.run(lambda: _build(config, files, worker, report))
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


def _build(config: EngineConfig, files: ModelFiles, worker: Worker, report: Report) -> EngineParts:
    plan = plan_engine(config, spec_from_config(files.config))  # what does not fit is said before anything is loaded
    report(LoadProgress("import"))
    import ops
    from runtime.models.load import load_model
    from runtime.runner.warmup import warm_up

    ops.force(None if config.kernels == "auto" else config.kernels)
    ops.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    decoder = load_model(
        files,
        dtype=plan.dtype,
        load_format=config.load_format,
        seed=config.seed or 0,
        progress=report,
        max_model_len=plan.max_model_len,
    )
    report(LoadProgress("warm-up"))
    parts = assemble(plan, decoder, files.eos_token_ids | config.end_token_ids, worker)
    warm_up(parts.runner, num_tokens=min(BLOCK_SIZE + 1, plan.max_model_len - 1), block_size=BLOCK_SIZE)
    for line in (*ops.describe(), *plan.notes):
        log.info(line)
    return parts


def plan_engine(config: EngineConfig, spec: DecoderSpec) -> EnginePlan:
    """What the options come to for this model, before it is loaded; no torch.

    Raises PlanError."""
    if config.device == "cuda":
        raise PlanError("device cuda is not supported yet; use --device cpu")
    dtype = CPU.dtype if config.dtype == "auto" else config.dtype
    weights_bytes = ELEMENT_BYTES[dtype] * sum(prod(parameter.shape) for parameter in spec.parameters())
    layers = tuple(LayerShape(layer.attention.num_kv_heads, layer.attention.head_size) for layer in spec.layers)
    return EnginePlan.resolve(
        config, dtype=dtype, layers=layers, model_len=spec.max_model_len, defaults=CPU,
        free_bytes=max(0, free_host_bytes() - weights_bytes),
    )  # fmt: skip


def assemble(plan: EnginePlan, decoder: Decoder, eos_token_ids: frozenset[int], worker: Worker) -> EngineParts:
    """Books, tables and runner around a loaded decoder."""
    import torch

    from runtime.kv.kv_cache import KVCache
    from runtime.runner.input_buffers import InputBuffers
    from runtime.runner.model_runner import ModelRunner
    from runtime.sample.sampler import Sampler

    dtype: torch.dtype = getattr(torch, plan.kv_cache_dtype)
    cache = KVCache(plan.layout, plan.num_kv_blocks, dtype, torch.device("cpu"))
    inputs = InputBuffers(plan.max_num_seqs, plan.max_model_len, plan.layout.block_size)
    runner = ModelRunner(decoder, cache, Sampler(decoder.spec.vocab_size, eos_token_ids), inputs, worker)
    limits = SchedulerLimits(plan.max_num_seqs, plan.max_num_batched_tokens, eos_token_ids)
    prefixes = PrefixCache(plan.layout.block_size, plan.enable_prefix_caching)
    scheduler = Scheduler(limits, BlockPool(plan.num_kv_blocks), prefixes, plan.policy)
    return EngineParts(scheduler, runner, _model_info(plan, decoder, eos_token_ids))


def _model_info(plan: EnginePlan, decoder: Decoder, eos_token_ids: frozenset[int]) -> ModelInfo:
    return ModelInfo(
        architecture=decoder.spec.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=decoder.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=decoder.dtype,
        device="cpu",
        num_parameters=decoder.num_parameters,
        weights_bytes=decoder.weights_bytes,
        num_kv_blocks=plan.num_kv_blocks,
        kv_block_size=plan.layout.block_size,
        kv_cache_bytes=plan.kv_cache_bytes,
        max_num_seqs=plan.max_num_seqs,
    )
