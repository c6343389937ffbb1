"""A model on the CPU: its plan, and the runner around a loaded model."""

from __future__ import annotations

from dataclasses import replace

import torch

import ops
from runtime.config import CPU, EngineConfig, EnginePlan, PlanError, WeightPolicy
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Model
from runtime.models.spec.model import ModelSpec
from runtime.runner.cpu_runner import CpuRunner
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.memory import free_host_bytes
from runtime.runner.warmup import next_tokens, prompts
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler


def plan(config: EngineConfig, spec: ModelSpec, stored_bytes: int | None = None) -> EnginePlan:
    """`stored_bytes`: of the model's weights in its files, if there are any. Raises PlanError."""
    weights, dtype = _weights(config), CPU.dtype
    if weights.dense_dtype != "stored" and not _native():
        dtype = weights.dense_dtype  # references compute in the type of the weights
    elif config.kv_cache_dtype == "auto" and config.dtype == "bfloat16":
        config = replace(config, kv_cache_dtype=config.dtype)
    weights_bytes = spec.weights_bytes(dtype if weights.dense_dtype == "stored" else weights.dense_dtype)
    if weights.keep_quantized and stored_bytes is not None:
        weights_bytes = min(weights_bytes, stored_bytes)
    return EnginePlan.resolve(
        config, dtype=dtype, layers=spec.memory_kinds(), model_len=spec.max_model_len, defaults=CPU,
        free_bytes=max(0, free_host_bytes() - weights_bytes), weights=weights,
    )  # fmt: skip


def _native() -> bool:
    """Whether kernels of our own read weights in other formats than the activations'."""
    return ops.linear_refusal([ops.WeightFormat("int8")], torch.float32, torch.device("cpu")) is None


def _weights(config: EngineConfig) -> WeightPolicy:
    """Kernels of our own read whatever is stored; references only numbers of the activations' dtype."""
    native = _native()
    numbers = config.dtype if config.dtype != "auto" else "stored" if native else CPU.dtype
    if config.quantization == "int8" and not native:
        raise PlanError(
            "quantization int8 is computed by the native kernels only, and they are not there or not wanted"
        )
    return WeightPolicy(
        numbers,
        keep_quantized=native and config.quantization != "none",
        online_int8=config.quantization == "int8",
    )


def build_runner(plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker) -> CpuRunner:
    cpu = torch.device("cpu")
    cache = KVCache(plan.layout, plan.num_kv_blocks, cpu)
    inputs = InputBuffers(plan.max_num_seqs, plan.max_model_len, plan.layout)
    sampler = Sampler(model.spec.vocab_size, eos_token_ids, plan.max_num_seqs, cpu)
    return CpuRunner(model.traced(cache.layers), cache, sampler, inputs, worker)


def warm_up(runner: CpuRunner, plan: EnginePlan) -> None:
    """One prompt of two blocks, then a token."""
    length = min(plan.layout.kernel_block_size + 1, plan.max_model_len - 1)
    batch = prompts([length], plan.layout, plan.num_kv_blocks)
    runner.run(batch)
    runner.run(next_tokens(batch))
