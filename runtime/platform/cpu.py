"""CPU platform: one worker thread computes steps, in memory that other processes of the host use too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

import ops
from runtime.api.media import MediaItem
from runtime.batch import ScheduledBatch
from runtime.config import (
    ELEMENT_BYTES,
    FP8_CACHES,
    GIB,
    INT8_CACHE,
    DeviceDefaults,
    EngineConfig,
    EnginePlan,
    PlanError,
    WeightPolicy,
)
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Encoder, Model
from runtime.models.spec.model import ModelSpec
from runtime.parallel.group import HostRank, Peers
from runtime.parallel.links import Ways
from runtime.parallel.stages import PipelineStage
from runtime.platform.host import free_host_bytes, num_cores, total_host_bytes, trim_heap
from runtime.platform.platform import DeviceMemory, Report
from runtime.platform.worker_lane import WorkerLane
from runtime.policy.step_budget import PlatformSteps, Slowdown
from runtime.policy.step_cost import TimedSteps
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.rank_worker import RankWorker
from runtime.runner.runner import ModelRunner, NoGraphs
from runtime.runner.warmup import POOLED, next_tokens, prompts, work_of
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler
from runtime.sample.synthetic import SyntheticAcceptance

_ROUNDED = {"int8": 1, "int16": 2}  # bytes per number
_TIMED_ROWS = 4
_TIMED_TIMES, _TIMED_S = 3, 0.1  # maximum timed steps of a kind, and seconds after which no further one is timed
# Maximum slowdown of a stream: three times its own step time with one other request, five times with several.
STEPS = PlatformSteps(longest_itl_s=0.2, least_tokens=16, slowdown=Slowdown(2.0, 5.0))

# On a CPU a step should not delay its decodes for seconds, and more than some hundred tokens are not faster per token.
DEFAULTS = DeviceDefaults("float32", 64, 512, lambda free_bytes: min(2 * GIB, free_bytes // 4))


class CpuPlatform:
    name = device = "cpu"

    def missing(self) -> str | None:
        return None

    def describe(self) -> str:
        return f"{num_cores()} CPU cores"

    def join(self, rank: HostRank) -> Peers:
        return rank

    def stage(self, ways: Ways, num_tensors: int, width: int, plan: EnginePlan) -> PipelineStage:
        return PipelineStage(ways, num_tensors, width, getattr(torch, plan.dtype))

    def use(self, device: int) -> None:
        """Do nothing, because there is only one CPU."""

    def refuse(self, config: EngineConfig) -> None:
        if config.online in _ROUNDED and not _native(config.online):
            raise PlanError(
                f"quantization {config.quantization} needs the native kernels, which are not installed or are turned off"
            )

        if config.quantization in ("fp8", "int4"):
            raise PlanError(f"quantization {config.quantization} is for GPUs; on a CPU use int8 or int16")
        if config.kv_cache_dtype in FP8_CACHES and config.kernels != "reference":
            raise PlanError(
                f"kv-cache-dtype {config.kv_cache_dtype} is for GPUs; on a CPU {INT8_CACHE} takes as many bytes"
            )

    def force_kernels(self, config: EngineConfig) -> None:
        ops.force(None if config.kernels == "auto" else config.kernels)
        for op in ("attend", "paged_attention"):
            ops.force(None, op)
        ops.set_num_threads(config.num_threads or num_cores())

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free_host_bytes(), total_host_bytes())

    def topology(self, devices: Sequence[int]) -> str:
        return ""

    def weights_bytes(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None) -> int:
        if config.online in _ROUNDED:
            return spec.weights_bytes("float32") * _ROUNDED[config.online] // ELEMENT_BYTES["float32"]
        weights = _weights(config)
        dense = spec.weights_bytes(DEFAULTS.dtype if weights.dense_dtype == "stored" else weights.dense_dtype)
        return dense if stored_bytes is None or not weights.keep_quantized else min(dense, stored_bytes)

    def plan(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None = None) -> EnginePlan:
        weights_bytes = self.weights_bytes(config, spec, stored_bytes)  # of one rank; all are equal
        weights, dtype = _weights(config), DEFAULTS.dtype
        if weights.dense_dtype != "stored" and not _native():
            dtype = weights.dense_dtype  # reference kernels compute in the weights' dtype
        elif config.kv_cache_dtype == "auto" and config.dtype == "bfloat16":
            config = replace(config, kv_cache_dtype=config.dtype)
        share = self.memory().free // (config.num_devices * config.data_parallel_size)
        return EnginePlan.resolve(
            config, dtype=dtype, layers=spec.memory_kinds(), model_len=spec.max_model_len, defaults=DEFAULTS,
            free_bytes=max(0, share - weights_bytes), weights=weights,
        )  # fmt: skip

    def compile_ahead(self, plan: EnginePlan) -> None:
        """Do nothing, because no kernels are compiled at start-up."""

    def out_of_memory_is(self, option: str) -> AbstractContextManager[None]:
        """Return a context manager without effect: the operating system kills a process that uses too much memory."""
        return nullcontext()

    def first_items(self, encoder: Encoder, plan: EnginePlan) -> list[list[MediaItem]]:
        return []

    def release_memory(self) -> None:
        trim_heap()

    def build_runner(
        self, config: EngineConfig, plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker,
        report: Report,
    ) -> tuple[ModelRunner, EnginePlan]:  # fmt: skip
        cpu = torch.device("cpu")
        cache = KVCache(plan.layout, plan.num_kv_blocks, cpu)
        runner = ModelRunner(
            model.traced(cache.layers),
            cache,
            InputBuffers(plan.max_num_seqs, plan.max_model_len, plan.layout, cache.layers, plan.max_proposed),
            Sampler(
                model.spec.vocab_size,
                eos_token_ids,
                plan.max_num_seqs,
                cpu,
                SyntheticAcceptance.of(plan.speculative, cpu),
                transcribes=model.encoder is not None and model.encoder.spec.speech is not None,
            ),
            WorkerLane(worker),
            NoGraphs(),
            plan.lookup,
        )
        if isinstance(worker, RankWorker):
            worker.has(runner.tables)
        timed = _warm_up(runner, plan, model, worker.rank.least if isinstance(worker, RankWorker) else int)
        return runner, plan.timed(config, timed, model.weights_bytes, STEPS)


def _native(rounded: str = "int8") -> bool:
    """Return True if compiled kernels of this project read weights quantised to the format `rounded`."""
    return ops.linear_refusal([ops.WeightFormat(rounded)], torch.float32, torch.device("cpu")) is None


def _weights(config: EngineConfig) -> WeightPolicy:
    """Return the weight policy: compiled kernels read all stored dtypes, reference kernels only the dtype of activations."""
    native = _native()
    return WeightPolicy(
        config.dtype if config.dtype != "auto" else "stored" if native else DEFAULTS.dtype,
        keep_quantized=native and config.quantization != "none",
        online=config.online,
    )


def _warm_up(runner: ModelRunner, plan: EnginePlan, model: Model, least: Callable[[int], int]) -> TimedSteps:
    """Run and time warm-up steps: a prompt of two blocks; one token after it, or for pooling a text of one token; and rows of one
    token each.

    Timings are noisy, so they have lower bounds: a prompt token costs at least 1/100 of its step, and a row at least half of a
    prompt token. `least`: function that returns the minimum of a number over all ranks, which run the same steps."""
    length = min(plan.layout.kernel_block_size + 1, plan.max_model_len - 1)
    work = work_of(model)
    batch = prompts([length], plan.layout, plan.num_kv_blocks, work)
    decodes = work is not POOLED
    after = next_tokens(batch) if decodes else prompts([1], plan.layout, plan.num_kv_blocks, work)
    runner.run(batch)
    runner.run(after)
    prompt_s, after_s = _seconds(runner, batch, least), _seconds(runner, after, least)
    token_s = max(prompt_s - after_s, prompt_s / 100) / max(1, length - 1)
    num_rows = min(_TIMED_ROWS, plan.max_num_seqs)
    if not decodes or num_rows == 1:
        return TimedSteps(after_s, token_s)
    rows = prompts([1] * num_rows, plan.layout, plan.num_kv_blocks, work)
    runner.run(rows)
    row_s = max((_seconds(runner, next_tokens(rows), least) - after_s) / (num_rows - 1), token_s / 2)
    return TimedSteps(max(after_s - row_s, after_s / 2), token_s, row_s)


def _seconds(runner: ModelRunner, batch: ScheduledBatch, least: Callable[[int], int]) -> float:
    """Return the seconds of a step on idle cores: the minimum of a few runs, or the time of one run if the model is large."""
    times: list[float] = []
    while not times or least(len(times) < _TIMED_TIMES and sum(times) < _TIMED_S):
        began_s = time.perf_counter()
        runner.run(batch)
        times.append(time.perf_counter() - began_s)
    return min(times)
