"""A model on the CPU: its plan, and the runner around a loaded decoder."""

from __future__ import annotations

import torch

from runtime.config import CPU, EngineConfig, EnginePlan
from runtime.kv.kv_cache import KVCache
from runtime.models.decoder import Decoder
from runtime.models.spec import DecoderSpec
from runtime.runner.cpu_runner import CpuRunner
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.memory import free_host_bytes
from runtime.runner.warmup import next_tokens, prompts
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler


def plan(config: EngineConfig, spec: DecoderSpec) -> EnginePlan:
    """Raises PlanError."""
    dtype = CPU.dtype if config.dtype == "auto" else config.dtype
    free_bytes = max(0, free_host_bytes() - spec.weights_bytes(dtype))
    return EnginePlan.resolve(
        config, dtype=dtype, layers=spec.kv_shapes(), model_len=spec.max_model_len, defaults=CPU, free_bytes=free_bytes
    )


def build_runner(plan: EnginePlan, decoder: Decoder, eos_token_ids: frozenset[int], worker: Worker) -> CpuRunner:
    cpu = torch.device("cpu")
    cache = KVCache(plan.layout, plan.num_kv_blocks, getattr(torch, plan.kv_cache_dtype), cpu)
    inputs = InputBuffers(plan.max_num_seqs, plan.max_model_len, plan.layout.block_size)
    sampler = Sampler(decoder.spec.vocab_size, eos_token_ids, plan.max_num_seqs, cpu)
    return CpuRunner(decoder, cache, sampler, inputs, worker)


def warm_up(runner: CpuRunner, plan: EnginePlan) -> None:
    """One prompt of two blocks, then a token."""
    length = min(plan.layout.block_size + 1, plan.max_model_len - 1)
    batch = prompts([length], plan.layout.block_size, plan.num_kv_blocks)
    runner.run(batch)
    runner.run(next_tokens(batch))
