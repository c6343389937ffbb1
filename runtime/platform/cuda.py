"""CUDA platform: plans memory, and builds the runner of a loaded model, with warm-up and captured graphs.

Memory is allocated in this order: weights; tables of the sampler and inputs; peak memory of the largest step, measured by
running it; captured graphs. The KV cache gets the rest of the memory that `gpu_memory_utilization` allows."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

import ops
from ops.collective import peer_memory
from runtime.api import LoadProgress
from runtime.api.media import MediaItem
from runtime.batch import Pool, ScheduledBatch
from runtime.config import ELEMENT_BYTES, GIB, DeviceDefaults, EngineConfig, EnginePlan, PlanError
from runtime.kv.kinds import Nothing, State
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Encoder, Model
from runtime.models.spec.model import ModelSpec
from runtime.parallel.group import HostRank, Peers
from runtime.parallel.links import Ways
from runtime.parallel.stages import PipelineStage
from runtime.platform.captured_steps import CapturedSteps
from runtime.platform.cuda_lane import CudaLane, RankLane
from runtime.platform.cuda_peers import CudaRank, CudaStage
from runtime.platform.cuda_topology import topology
from runtime.platform.encoder_graphs import EncoderGraphs
from runtime.platform.graph_pool import CapturedProposals, GraphPool, decode_sizes
from runtime.platform.host import num_cores, trim_heap
from runtime.platform.platform import DeviceMemory, Report
from runtime.policy.step_budget import Lead, PlatformSteps
from runtime.policy.step_cost import TimedSteps
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.drafter import Drafter
from runtime.runner.rank_worker import RankWorker
from runtime.runner.runner import ModelRunner
from runtime.runner.warmup import adapter_slots_of, next_tokens, prompts, with_a_short_one, work_of
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler
from runtime.sample.synthetic import SyntheticAcceptance

log = logging.getLogger("oneloop.start")

# All memory that --gpu-memory-utilization allows. 8192 tokens keep the matrix units of any device busy.
DEFAULTS = DeviceDefaults("bfloat16", 256, 8192, lambda free_bytes: free_bytes, looks_up=True)

# Fewer tokens leave matrix units idle. The host needs 26 to 31 us per row: with a fixed lead of 3 ms, 256 rows of 8B had
# 2.8 % lower throughput.
STEPS = PlatformSteps(longest_itl_s=0.07, least_tokens=256, lead=Lead(0.003, 4e-5))
_ENCODER_STEP_BYTES = GIB
_GRAPH_BYTES = 8 << 20  # memory of the driver for one captured graph
_MEASURED_KV_BYTES = 256 << 20  # maximum KV memory in the first, measured step; at least one block


class CudaPlatform:
    """NVIDIA GPUs. `gpu_memory_utilization`: fraction of the device's total memory that this process uses, as in vLLM."""

    name = device = "cuda"

    def __init__(self) -> None:
        self._free_at_start: dict[int, int] = {}  # free bytes of each device before the model was loaded

    def missing(self) -> str | None:
        if torch.cuda.is_available():
            return None
        return "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"

    def describe(self) -> str:
        return torch.cuda.get_device_name()

    def join(self, rank: HostRank) -> Peers:
        torch.cuda.set_device(rank.device)
        self._free_at_start.setdefault(rank.device, self.memory().free)
        return CudaRank(rank) if rank.size > 1 else rank

    def stage(self, ways: Ways, num_tensors: int, width: int, plan: EnginePlan) -> PipelineStage:
        return CudaStage(ways, num_tensors, width, getattr(torch, plan.dtype), plan.max_num_batched_tokens)

    def use(self, device: int) -> None:
        torch.cuda.set_device(device)

    def refuse(self, config: EngineConfig) -> None:
        if config.kernels == "native":
            raise PlanError("--kernels native is for the CPU; use --device cpu, or leave --kernels out")
        size, copies = config.tensor_parallel_size, config.data_parallel_size * config.num_stages_here
        if copies > 1 and size * copies > (there := torch.cuda.device_count()):
            sizes = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
            named = [f"{each.replace('_', '-')} {num}" for each in sizes if (num := getattr(config, each)) > 1]
            raise PlanError(
                f"{' and '.join(named)} take {size * copies} devices, of which there are {there} here: lower "
                + ("it" if len(named) == 1 else "one of them")
            )
        for first in range(0, size * copies, size):
            if size > 1 and (why := peer_memory.refusal(range(first, first + size))) is not None:
                raise PlanError(f"tensor-parallel-size {size} is not for this machine: {why}")
        if config.quantization in ("int8", "int16"):
            raise PlanError(
                f"quantization {config.quantization} is for the CPU; use --device cpu, or leave --quantization out"
            )
        if config.online is not None and (why := _online_refusal(config, config.online)) is not None:
            raise PlanError(f"quantization {config.quantization} is not for this device: {why}")

    def force_kernels(self, config: EngineConfig) -> None:
        ops.force(None if config.kernels == "auto" else config.kernels)
        for op in ("attend", "paged_attention"):
            ops.force(None if config.attention_backend == "auto" else config.attention_backend, op)
        ops.set_num_threads(config.num_threads or num_cores())

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*torch.cuda.mem_get_info())

    def topology(self, devices: Sequence[int]) -> str:
        return topology(devices)

    def weights_bytes(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None) -> int:
        """Return a lower bound of the weights' bytes. Formats without a kernel are dequantised and need more."""
        dense = spec.weights_bytes(_dtype(config))
        if config.online is not None:
            return dense // (4 if config.online == "w4" else 2)
        return dense if stored_bytes is None or config.quantization == "none" else min(dense, stored_bytes)

    def plan(self, config: EngineConfig, spec: ModelSpec, stored_bytes: int | None = None) -> EnginePlan:
        return self._plan(config, spec, self.weights_bytes(config, spec, stored_bytes))

    def _plan(self, config: EngineConfig, spec: ModelSpec, to_come: int) -> EnginePlan:
        """Plan the memory. `to_come`: bytes that the model, steps and graphs will allocate after this. Raises PlanError."""
        to_come += _encoder_bytes(config, spec)
        free, total = self.memory()
        free_at_start = self._free_at_start.setdefault(_current().index if torch.cuda.is_available() else 0, free)
        share = config.gpu_memory_utilization
        granted, used = int(total * share), free_at_start - free
        left = granted - used - to_come
        needs_none = all(isinstance(kind, Nothing) for kind in spec.memory_kinds())
        sized = needs_none or config.kv_cache_bytes is not None or config.num_kv_blocks is not None
        if granted > free_at_start and not sized:
            raise PlanError(
                f"gpu-memory-utilization {share} is {granted / GIB:.1f} of the device's {total / GIB:.1f} GiB, and only "
                f"{free_at_start / GIB:.1f} are free; other processes use the rest. Lower it to "
                f"{int(free_at_start / total * 100) / 100:.2f} at most"
            )
        if left <= 0 and not sized:
            raise PlanError(
                f"nothing is left for the KV cache: model and steps take {(used + to_come) / GIB:.1f} GiB of the "
                f"{granted / GIB:.1f} that gpu-memory-utilization {share} grants of the device's {total / GIB:.1f}; raise it, "
                "lower max-num-batched-tokens, or take a smaller model"
            )
        plan = EnginePlan.resolve(
            config,
            dtype=_dtype(config),
            layers=spec.memory_kinds(),
            model_len=spec.max_model_len,
            defaults=DEFAULTS,
            free_bytes=max(0, left),
        )
        _refuse_cache(plan)
        return plan

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

    def release_memory(self) -> None:
        torch.cuda.empty_cache()
        trim_heap()

    def build_runner(
        self, config: EngineConfig, plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker,
        report: Report,
    ) -> tuple[ModelRunner, EnginePlan]:  # fmt: skip
        report(LoadProgress("kernels"))
        instead_of = ops.caches_stand_for(plan.num_kv_blocks / _tried_blocks(plan))
        with self.out_of_memory_is("lower max-num-seqs or max-num-batched-tokens"), instead_of:
            pools = isinstance(work_of(model), Pool) or (config.pools and plan.speculative is None)
            step_bytes, base_s, token_s = _measure_step(plan, model, eos_token_ids, worker, pools=pools)
        drafts = plan.speculative is not None and not model.spec.hands_on
        captured: dict[str, bool] = {"drafts": drafts, "adapters": model.adapters is not None, "pools": pools}
        graphs = GraphPool(plan.max_num_seqs, plan.max_num_batched_tokens, **captured)
        captures, graph_bytes = config.captures and model.graph_unsupported_reason is None, 0
        if captures:
            num_rounds = 2 * len(decode_sizes(plan.max_num_seqs)) if plan.max_proposed else 0  # at most two kinds
            num_shapes = len(graphs.shapes) * (2 if plan.max_proposed else 1)  # a drafter's part is a separate graph
            graph_bytes = step_bytes + _GRAPH_BYTES * (num_shapes + num_rounds)
        final = self._plan(config, model.spec, step_bytes + graph_bytes)
        if isinstance(worker, RankWorker):
            num_blocks, max_model_len = map(worker.rank.least, (final.num_kv_blocks, final.max_model_len))
            final = replace(final, num_kv_blocks=num_blocks, max_model_len=max_model_len)
        final = final.timed(config, TimedSteps(base_s, token_s), model.weights_bytes, STEPS)
        graphs = GraphPool(final.max_num_seqs, final.max_num_batched_tokens, **captured)  # with the final limits
        with self.out_of_memory_is("lower gpu-memory-utilization, kv-cache-memory or max-num-seqs"):
            parts = _parts(final, model, eos_token_ids, final.num_kv_blocks, graphs, worker)
            if isinstance(worker, RankWorker):
                worker.has(parts.runner.tables)
            _run_each_kind(parts.runner, final, final.num_kv_blocks, model, pools=pools)
            if drafts:
                _run_drafted(parts, final, graphs)
            if captures:
                together = isinstance(worker, RankWorker)  # the ranks capture together
                self._capture(parts, graphs, report, all_now=together, may_fail=model.may_refuse_capture)
                _capture_proposals(parts.runner.drafter, final, graphs)
                final = replace(final, max_drafted_tokens=graphs.longest_drafted)
        if config.captures and model.encoder is not None:
            model.encoder.passes = EncoderGraphs()
        if config.captures and not captures:
            log.info("CUDA graphs are disabled: %s", model.graph_unsupported_reason)
        return parts.runner, final

    def first_items(self, encoder: Encoder, plan: EnginePlan) -> list[list[MediaItem]]:
        """Return sample items. Each new shape of an item compiles or loads kernels and allocates memory."""
        return encoder.samples(plan.max_num_encoder_tokens)

    def _capture(
        self, parts: _Parts, graphs: GraphPool, report: Report, *, all_now: bool, may_fail: bool
    ) -> None:  # fmt: skip
        """Capture graphs before serving: all of them if `all_now`, otherwise the first ones. `may_fail`: errors are logged."""
        every = graphs.shapes
        shapes = every if all_now else graphs.first
        free_before = self.memory().free

        def reported() -> Iterator[StepShape]:
            for done, shape in enumerate(shapes):
                report(LoadProgress("graphs", done, len(shapes), "graphs"))
                yield shape

        torch.cuda.empty_cache()
        try:
            parts.steps.capture(reported(), parts.runner.capturable)
        except RuntimeError as error:
            if not may_fail or isinstance(error, torch.OutOfMemoryError):
                raise
            graphs.clear()
            log.warning("CUDA graphs are disabled: a module cannot be captured (%s)", str(error).splitlines()[0])
        torch.cuda.synchronize()
        report(LoadProgress("graphs", len(shapes), len(shapes), "graphs"))
        taken = free_before - self.memory().free
        if graphs.num_captured:
            of_all = f" of {len(every)}" if graphs.has_more else ""
            log.info("captured %d%s steps in %.2f GiB", len(shapes), of_all, taken / GIB)


def _capture_proposals(drafter: Drafter, plan: EnginePlan, graphs: GraphPool) -> None:
    """Capture the drafter's rounds, in the memory pool of the captured steps, since only one graph runs at a time."""
    if graphs.memory is None:
        return
    for each in drafter.rounds:
        captured = CapturedProposals(decode_sizes(plan.max_num_seqs))
        with torch.inference_mode():
            captured.capture(each.compute, graphs.memory)
        each.graphs = captured


def _encoder_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the bytes of an encoder's outputs and an estimate for its activations."""
    if spec.encoder is None and not config.enable_prompt_embeds:
        return 0
    width = spec.pooler_info.embedding_size * (1 + (0 if spec.encoder is None else spec.encoder.num_deepstack))
    return config.encoder_cache_size * width * ELEMENT_BYTES[_dtype(config)] + _ENCODER_STEP_BYTES


def _dtype(config: EngineConfig) -> str:
    return DEFAULTS.dtype if config.dtype == "auto" else config.dtype


def _online_refusal(config: EngineConfig, rounded: str) -> str | None:
    return ops.linear_refusal([ops.WeightFormat(rounded)], getattr(torch, _dtype(config)), torch.device("cuda"))


def _refuse_cache(plan: EnginePlan) -> None:
    """Raise PlanError if no kernel on this device supports the KV cache's dtype."""
    attention = {kind.kv for kind in plan.layout.kinds if not isinstance(kind, State | Nothing)}
    for kv in attention:
        why = ops.cache_refusal(torch.device("cuda"), getattr(torch, kv.known_dtype.name), kv.head_size)
        if why is not None:
            raise PlanError(f"kv-cache-dtype {plan.kv_cache_dtype} is not for this model and device: {why}")


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _measure_step(
    plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], worker: Worker, *, pools: bool
) -> tuple[int, float, float]:
    """Compile all kernels and measure steps. Return three numbers: the bytes of the largest step besides weights and KV cache,
    the seconds of the smallest step, and the seconds per token of the largest step."""
    before = torch.cuda.memory_allocated()
    num_blocks = _tried_blocks(plan)
    runner = _parts(plan, model, eos_token_ids, num_blocks, graphs=GraphPool(1, 2, pools=pools)).runner
    longest = plan.max_model_len - 2
    lengths = [longest] * (plan.max_num_batched_tokens // longest) or [plan.max_num_batched_tokens]
    work = work_of(model, pools=pools)
    batch = prompts(lengths[: plan.max_num_seqs], plan.layout, num_blocks, work, adapter_slots_of(model)[-1])
    rank = worker.rank if isinstance(worker, RankWorker) else None
    for stage in range(plan.num_stages):
        if not isinstance(worker, RankWorker) or (worker.rank.number == 0 and worker.stage_number == stage):
            with nullcontext() if rank is None else rank.by_itself(), ops.compile_together(_current()):
                runner.run(batch)
                if beside := with_a_short_one(lengths, plan.max_num_seqs):
                    runner.run(prompts(beside, plan.layout, num_blocks, work, adapter_slots_of(model)[-1]))
                _run_each_kind(runner, plan, num_blocks, model, pools=pools)
        if rank is not None:
            rank.least(0)  # other ranks wait for the first to compile, and load its kernels from disk
    torch.cuda.reset_peak_memory_stats()
    runner.run(batch)
    token_s = _seconds(runner, batch) / batch.num_tokens
    peak = torch.cuda.max_memory_allocated()
    smallest = prompts([1], plan.layout, num_blocks, work)
    base_s = min(_seconds(runner, smallest) for _ in range(3))
    runner.stop()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return peak - before, base_s, token_s


def _tried_blocks(plan: EnginePlan) -> int:
    """Return the number of blocks of the small KV cache that is used to measure a step."""
    return max(1, min(64, _MEASURED_KV_BYTES // max(1, plan.layout.block_bytes)))


def _seconds(runner: ModelRunner, batch: ScheduledBatch) -> float:
    began_s = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - began_s


def _has_axes(model: Model) -> bool:
    """Return True if media can give tokens other rotary positions than their index (M-RoPE)."""
    return model.encoder is not None and model.encoder.spec.rope_positions is not None


class _Parts(NamedTuple):
    runner: ModelRunner
    inputs: DeviceInputs
    steps: CapturedSteps


def _parts(
    plan: EnginePlan, model: Model, eos_token_ids: frozenset[int], num_blocks: int, graphs: GraphPool,
    worker: Worker | None = None,
) -> _Parts:  # fmt: skip
    device = _current()
    lane: Any = RankLane if isinstance(worker, RankWorker) else CudaLane
    cache = KVCache(plan.layout, num_blocks, device)
    inputs = DeviceInputs(
        plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.layout, plan.steps_in_flight,
        device, cache.layers, plan.max_proposed, adapters=model.adapters is not None,
        axes=_has_axes(model),
    )  # fmt: skip
    steps = CapturedSteps(inputs, graphs, worker)
    runner = ModelRunner(
        model,
        cache,
        inputs,
        Sampler(
            model.spec.vocab_size,
            eos_token_ids,
            plan.max_num_seqs,
            device,
            SyntheticAcceptance.of(plan.speculative, device),
            transcribes=model.encoder is not None and model.encoder.spec.speech is not None,
        ),
        lane(plan.max_num_seqs, plan.steps_in_flight, device, worker),
        steps,
        plan.lookup,
        pools=graphs.pools,
    )
    return _Parts(runner, inputs, steps)


def _run_each_kind(runner: ModelRunner, plan: EnginePlan, num_blocks: int, model: Model, *, pools: bool) -> None:
    """Run one step of each kind that occurs later, so that all kernels are compiled and all memory is allocated."""
    length = min(plan.layout.kernel_block_size + 1, plan.max_model_len - 2)
    for num_rows, slot in product(sorted({1, min(2, plan.max_num_seqs), plan.max_num_seqs}), adapter_slots_of(model)):
        lengths = [min(length, plan.max_num_batched_tokens // num_rows)] * num_rows
        batch = prompts(lengths, plan.layout, num_blocks, work_of(model, pools=pools), slot)
        runner.run(batch)
        if not pools:
            runner.run(next_tokens(batch))
    has_room = 1 < plan.max_num_seqs < plan.max_num_batched_tokens and plan.max_model_len > 3
    if has_room and not plan.layout.in_one_step:  # a few tokens of many requests
        lengths = [2, *[1] * (plan.max_num_seqs - 1)]
        runner.run(prompts(lengths, plan.layout, num_blocks, work_of(model, pools=pools), adapter_slots_of(model)[-1]))


@torch.inference_mode()
def _run_drafted(parts: _Parts, plan: EnginePlan, graphs: GraphPool) -> None:
    """Run steps with draft tokens: in each shape that will be captured, and without a graph. See `_run_each_kind`."""
    for shape in graphs.shapes:
        if not shape.drafts:
            continue
        num_rows, slot = max(1, min(shape.num_tokens // 2, plan.max_num_seqs)), 0 if shape.adapters else -1
        batch = prompts([1] * num_rows, plan.layout, plan.num_kv_blocks, adapter_slot=slot)
        parts.runner.run(batch)
        parts.inputs.upload(next_tokens(batch, 1).rows, shape)
        _, _, follow = parts.runner.capturable(parts.inputs.placed(shape, None))
        if follow is not None:
            follow()
        parts.runner.run(batch)
        parts.runner.run(next_tokens(batch, 1))
    for each in parts.runner.drafter.rounds:
        for num_rows in decode_sizes(plan.max_num_seqs):
            each.compute(num_rows)  # only compiles: no row uses the result
