"""A CUDA device: what fits in its memory, and the runner around a loaded model, warmed up and captured.

Memory, in this order: weights; tables of the sampler and the inputs; what a step of the largest size takes, found by running
one; what captured graphs keep; and all the rest of the share that was asked for is KV cache."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

import ops
from runtime.api import LoadProgress
from runtime.config import GIB, INT8_CACHE, DeviceDefaults, EngineConfig, EnginePlan, PlanError
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Model
from runtime.models.spec.model import ModelSpec
from runtime.platform.captured_steps import CapturedSteps
from runtime.platform.cuda_lane import CudaLane
from runtime.platform.graph_pool import GraphPool
from runtime.platform.host import num_cores
from runtime.platform.platform import DeviceMemory, Report
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.runner import ModelRunner, Sampled
from runtime.runner.warmup import next_tokens, prompts
from runtime.runner.worker import Worker
from runtime.sample.drafts import DraftRules
from runtime.sample.sampler import Sampler

log = logging.getLogger("oneloop.start")

# All the memory that --gpu-memory-utilization leaves. 8192 tokens keep any device's matrix units busy.
DEFAULTS = DeviceDefaults("bfloat16", 256, 8192, lambda free_bytes: free_bytes)

MIXED_STEP_S = 0.025  # about as long as a prompt may keep other people's streams waiting
_MIXED_PIECE = 512  # tokens
_GRAPH_BYTES = 8 << 20  # the driver's own memory for one captured step
_MEASURED_KV_BYTES = 256 << 20  # that the first step, which is measured, may take for blocks, of which one must do


class CudaPlatform:
    name = device = "cuda"

    def missing(self) -> str | None:
        if torch.cuda.is_available():
            return None
        return "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"

    def describe(self) -> str:
        return torch.cuda.get_device_name()

    def refuse(self, config: EngineConfig) -> None:
        if config.kernels == "native":
            raise PlanError("kernels native are for the CPU; use --device cpu, or leave --kernels alone")
        if config.quantization == "int8":
            raise PlanError("quantization int8 is for the CPU; use --device cpu, or leave --quantization alone")
        if config.kv_cache_dtype == INT8_CACHE:
            raise PlanError(
                f"kv-cache-dtype {INT8_CACHE} is for the CPU; use --device cpu, or leave --kv-cache-dtype alone"
            )

    def force_kernels(self, config: EngineConfig) -> None:
        ops.force(None if config.kernels == "auto" else config.kernels)
        for op in ("attend", "paged_attention"):
            ops.force(None if config.attention_backend == "auto" else config.attention_backend, op)
        ops.set_num_threads(config.num_threads or num_cores())

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*torch.cuda.mem_get_info())

    def plan(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None = None) -> EnginePlan:
        """Quantised weights become numbers, so how they are stored does not matter."""
        dtype = _dtype(config)
        return self._plan(config, spec, spec.weights_bytes(dtype))

    def _plan(self, config: EngineConfig, spec: ModelSpec, to_come: int) -> EnginePlan:
        """`to_come`: bytes that model, steps and graphs will take on top of what is allocated now. Raises PlanError."""
        free, total = self.memory()
        share = int(total * config.gpu_memory_utilization) - (total - free)
        left = share - to_come
        sized = config.kv_cache_bytes is not None or config.num_kv_blocks is not None
        if left <= 0 and not sized:
            raise PlanError(
                f"nothing is left for the KV cache: of {total / GIB:.1f} GiB on the device {free / GIB:.1f} are free, and model "
                f"and steps take {(share - left) / GIB:.1f} of the {share / GIB:.1f} that gpu-memory-utilization "
                f"{config.gpu_memory_utilization} grants; raise it, lower max-num-batched-tokens, or take a smaller model"
            )
        return EnginePlan.resolve(
            config,
            dtype=_dtype(config),
            layers=spec.memory_kinds(),
            model_len=spec.max_model_len,
            defaults=DEFAULTS,
            free_bytes=max(0, left),
        )

    def compile_ahead(self, plan: EnginePlan) -> None:
        ops.compile_ahead(_current(), getattr(torch, plan.dtype))

    @contextmanager
    def out_of_memory_is(self, option: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = self.memory()
            raise PlanError(
                f"the device is out of memory ({free / GIB:.1f} of {total / GIB:.1f} GiB free): {option}"
            ) from error

    def build_runner(
        self, config: EngineConfig, plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker,
        report: Report,
    ) -> tuple[ModelRunner, EnginePlan]:  # fmt: skip
        report(LoadProgress("kernels"))
        with self.out_of_memory_is("lower max-num-seqs or max-num-batched-tokens"):
            step_bytes, tokens_per_s = _measure_step(plan, model, eos_token_ids)
        graphs = GraphPool(plan.max_num_seqs, plan.max_num_batched_tokens)
        captures, graph_bytes = config.captures and model.graph_unsupported_reason is None, 0
        if captures:
            graph_bytes = step_bytes + _GRAPH_BYTES * len(list(graphs.shapes))
        final = self._plan(config, model.spec, step_bytes + graph_bytes)
        if config.max_num_mixed_tokens is None:
            final = replace(final, max_num_mixed_tokens=_mixed_tokens(final.max_num_batched_tokens, tokens_per_s))
        with self.out_of_memory_is("lower gpu-memory-utilization, kv-cache-memory or max-num-seqs"):
            parts = _parts(final, model, eos_token_ids, final.num_kv_blocks, graphs, worker)
            _run_each_kind(parts.runner, final, final.num_kv_blocks)
            if captures:
                self._capture(parts, graphs, report)
        if config.captures and not captures:
            log.info("no steps are captured as graphs: %s", model.graph_unsupported_reason)
        return parts.runner, final

    def _capture(self, parts: _Parts, graphs: GraphPool, report: Report) -> None:
        shapes = list(graphs.shapes)
        free_before = self.memory().free

        def compute(shape: StepShape) -> Sampled:
            return parts.runner.compute(parts.inputs.placed(shape, None)).sampled

        def reported() -> Iterator[StepShape]:
            for done, shape in enumerate(shapes):
                report(LoadProgress("graphs", done, len(shapes), "graphs"))
                yield shape

        gc.collect()
        gc.disable()  # a collection in the middle of a capture may free what belongs to it
        try:
            with torch.inference_mode():
                graphs.capture(reported(), compute)
        finally:
            gc.enable()
        torch.cuda.synchronize()
        report(LoadProgress("graphs", len(shapes), len(shapes), "graphs"))
        taken = free_before - self.memory().free
        log.info("captured %d steps in %.2f GiB", len(shapes), taken / GIB)


def _dtype(config: EngineConfig) -> str:
    return DEFAULTS.dtype if config.dtype == "auto" else config.dtype


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _measure_step(plan: EnginePlan, model: Model, eos_token_ids: frozenset[int]) -> tuple[int, float]:
    """Bytes that the largest step takes on top of weights and KV, and tokens that it computes in a second; compiles all
    kernels on the way."""
    before = torch.cuda.memory_allocated()
    num_blocks = max(1, min(64, _MEASURED_KV_BYTES // plan.layout.block_bytes))
    runner = _parts(plan, model, eos_token_ids, num_blocks, graphs=GraphPool(1, 2)).runner
    longest = plan.max_model_len - 2
    lengths = [longest] * (plan.max_num_batched_tokens // longest) or [plan.max_num_batched_tokens]
    batch = prompts(lengths[: plan.max_num_seqs], plan.layout, num_blocks)
    with ops.compile_together(_current()):
        runner.run(batch)
        _run_each_kind(runner, plan, num_blocks)
    torch.cuda.reset_peak_memory_stats()
    runner.run(batch)
    began_s = time.perf_counter()
    runner.run(batch)
    tokens_per_s = batch.num_tokens / (time.perf_counter() - began_s)
    peak = torch.cuda.max_memory_allocated()
    runner.stop()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return peak - before, tokens_per_s


def _mixed_tokens(most: int, tokens_per_s: float) -> int:
    """Tokens of prompts beside decodes that take MIXED_STEP_S at that rate: at most `most`, and whole pieces."""
    fitting = int(tokens_per_s * MIXED_STEP_S) // _MIXED_PIECE * _MIXED_PIECE
    return min(most, max(_MIXED_PIECE, fitting))


class _Parts(NamedTuple):
    runner: ModelRunner
    inputs: DeviceInputs


def _parts(
    plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], num_blocks: int, graphs: GraphPool,
    worker: Worker | None = None,
) -> _Parts:  # fmt: skip
    device = _current()
    cache = KVCache(plan.layout, num_blocks, device)
    inputs = DeviceInputs(
        plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.layout, plan.steps_in_flight,
        device, cache.layers,
    )  # fmt: skip
    runner = ModelRunner(
        model,
        cache,
        inputs,
        Sampler(model.spec.vocab_size, eos_token_ids, plan.max_num_seqs, device),
        CudaLane(plan.max_num_seqs, plan.steps_in_flight, device, worker),
        CapturedSteps(inputs, graphs),
        DraftRules.of(plan.layout),
    )
    return _Parts(runner, inputs)


def _run_each_kind(runner: ModelRunner, plan: EnginePlan, num_blocks: int) -> None:
    """One step of each kind that will be captured or run: kernels are compiled, and nothing is left to be allocated late."""
    length = min(plan.layout.kernel_block_size + 1, plan.max_model_len - 2)
    for num_rows in sorted({1, min(2, plan.max_num_seqs), plan.max_num_seqs}):
        batch = prompts([min(length, plan.max_num_batched_tokens // num_rows)] * num_rows, plan.layout, num_blocks)
        runner.run(batch)
        runner.run(next_tokens(batch))
