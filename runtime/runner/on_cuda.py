"""A model on a CUDA device: what fits in its memory, and the runner around a loaded model, warmed up and captured.

Memory, in this order: weights; tables of the sampler and the inputs; what a step of the largest size takes, found by running
one; what captured graphs keep; and all the rest of the share that was asked for is KV cache."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

import ops
from runtime.api import LoadProgress
from runtime.config import CUDA, GIB, INT8_CACHE, EngineConfig, EnginePlan, PlanError
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Model
from runtime.models.spec.model import ModelSpec
from runtime.runner.cuda_runner import CudaRunner
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.graph_pool import GraphPool
from runtime.runner.warmup import next_tokens, prompts
from runtime.sample.sampler import Sampler

log = logging.getLogger("oneloop.start")

Report = Callable[[LoadProgress], None]

MIXED_STEP_S = 0.025  # about as long as a prompt may keep other people's streams waiting
_MIXED_PIECE = 512  # tokens
_GRAPH_BYTES = 8 << 20  # the driver's own memory for one captured step
_MEASURED_KV_BYTES = 256 << 20  # that the first step, which is measured, may take for blocks, of which one must do


def plan(config: EngineConfig, spec: ModelSpec, used_beside: int | None = None) -> EnginePlan:
    """`used_beside`: bytes that a step and its graphs will take on top of what is allocated now; None before loading, when
    the weights are still to come.

    Raises PlanError."""
    if config.quantization == "int8":
        raise PlanError("quantization int8 is for the CPU; use --device cpu, or leave --quantization alone")
    if config.kv_cache_dtype == INT8_CACHE:
        raise PlanError(
            f"kv-cache-dtype {INT8_CACHE} is for the CPU; use --device cpu, or leave --kv-cache-dtype alone"
        )
    dtype = CUDA.dtype if config.dtype == "auto" else config.dtype
    free, total = torch.cuda.mem_get_info()
    share = int(total * config.gpu_memory_utilization) - (total - free)
    left = share - (spec.weights_bytes(dtype) if used_beside is None else used_beside)
    sized = config.kv_cache_bytes is not None or config.num_kv_blocks is not None
    if left <= 0 and not sized:
        raise PlanError(
            f"nothing is left for the KV cache: of {total / GIB:.1f} GiB on the device {free / GIB:.1f} are free, and model and "
            f"steps take {(share - left) / GIB:.1f} of the {share / GIB:.1f} that gpu-memory-utilization "
            f"{config.gpu_memory_utilization} grants; raise it, lower max-num-batched-tokens, or take a smaller model"
        )
    return EnginePlan.resolve(
        config,
        dtype=dtype,
        layers=spec.memory_kinds(),
        model_len=spec.max_model_len,
        defaults=CUDA,
        free_bytes=max(0, left),
    )


def compile_ahead(plan: EnginePlan) -> None:
    """Kernels that need a compiler begin to get it while weights are read."""
    ops.compile_ahead(_device(), getattr(torch, plan.dtype))


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def out_of_memory_is(option: str) -> Iterator[None]:
    """Raises PlanError, naming what to change, where the device has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise PlanError(
            f"the device is out of memory ({free / GIB:.1f} of {total / GIB:.1f} GiB free): {option}"
        ) from error


def build_runner(
    config: EngineConfig, first_plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], report: Report
) -> tuple[CudaRunner, EnginePlan]:
    """The runner, and the plan as it came out once memory was measured.

    Raises PlanError."""
    report(LoadProgress("kernels"))
    with out_of_memory_is("lower max-num-seqs or max-num-batched-tokens"):
        step_bytes, tokens_per_s = _measure_step(first_plan, model, eos_token_ids)
    graphs = GraphPool(first_plan.max_num_seqs, first_plan.max_num_batched_tokens)
    captures, graph_bytes = config.captures and model.graph_unsupported_reason is None, 0
    if captures:
        graph_bytes = step_bytes + _GRAPH_BYTES * len(list(graphs.shapes))
    final = plan(config, model.spec, step_bytes + graph_bytes)
    if config.max_num_mixed_tokens is None:
        final = replace(final, max_num_mixed_tokens=_mixed_tokens(final.max_num_batched_tokens, tokens_per_s))
    with out_of_memory_is("lower gpu-memory-utilization, kv-cache-memory or max-num-seqs"):
        runner, inputs = _parts(final, model, eos_token_ids, final.num_kv_blocks, graphs)
        _run_each_kind(runner, final, final.num_kv_blocks)
        if captures:
            _capture(runner, inputs, graphs, report)
    if config.captures and not captures:
        log.info("no steps are captured as graphs: %s", model.graph_unsupported_reason)
    return runner, final


def _measure_step(plan: EnginePlan, model: Model, eos_token_ids: frozenset[int]) -> tuple[int, float]:
    """Bytes that the largest step takes on top of weights and KV, and tokens that it computes in a second; compiles all
    kernels on the way."""
    before = torch.cuda.memory_allocated()
    num_blocks = max(1, min(64, _MEASURED_KV_BYTES // plan.layout.block_bytes))
    runner, _ = _parts(plan, model, eos_token_ids, num_blocks, graphs=GraphPool(1, 2))
    longest = plan.max_model_len - 2
    lengths = [longest] * (plan.max_num_batched_tokens // longest) or [plan.max_num_batched_tokens]
    batch = prompts(lengths[: plan.max_num_seqs], plan.layout, num_blocks)
    with ops.compile_together(_device()):
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


def _parts(
    plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], num_blocks: int, graphs: GraphPool
) -> tuple[CudaRunner, DeviceInputs]:
    device = _device()
    cache = KVCache(plan.layout, num_blocks, device)
    sampler = Sampler(model.spec.vocab_size, eos_token_ids, plan.max_num_seqs, device)
    inputs = DeviceInputs(
        plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.layout, plan.steps_in_flight,
        device,
    )  # fmt: skip
    runner = CudaRunner(
        model, cache, sampler, inputs, graphs, max_num_seqs=plan.max_num_seqs, steps_in_flight=plan.steps_in_flight
    )
    return runner, inputs


def _run_each_kind(runner: CudaRunner, plan: EnginePlan, num_blocks: int) -> None:
    """One step of each kind that will be captured or run: kernels are compiled, and nothing is left to be allocated late."""
    length = min(plan.layout.kernel_block_size + 1, plan.max_model_len - 2)
    for num_lines in sorted({1, min(2, plan.max_num_seqs), plan.max_num_seqs}):
        batch = prompts([min(length, plan.max_num_batched_tokens // num_lines)] * num_lines, plan.layout, num_blocks)
        runner.run(batch)
        runner.run(next_tokens(batch))


def _capture(runner: CudaRunner, inputs: DeviceInputs, graphs: GraphPool, report: Report) -> None:
    shapes = list(graphs.shapes)
    free_before, _ = torch.cuda.mem_get_info()

    def told() -> Iterator[StepShape]:
        for done, shape in enumerate(shapes):
            report(LoadProgress("graphs", done, len(shapes), "graphs"))
            yield shape

    gc.collect()
    gc.disable()  # a collection in the middle of a capture may free what belongs to it
    try:
        with torch.inference_mode():
            graphs.capture(told(), lambda shape: runner.compute(inputs.view(shape, None)))
    finally:
        gc.enable()
    torch.cuda.synchronize()
    report(LoadProgress("graphs", len(shapes), len(shapes), "graphs"))
    taken = free_before - torch.cuda.mem_get_info()[0]
    log.info("captured %d steps in %.2f GiB", len(shapes), taken / GIB)
