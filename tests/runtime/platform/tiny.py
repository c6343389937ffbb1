"""A third platform: tensors in the host's memory, steps computed by the event loop itself as they are launched, at a device's
fixed addresses, by torch's references. It shares no code with the two that are built in but what every runner shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import ops
from runtime.config import DeviceDefaults, EngineConfig, EnginePlan, PlanError
from runtime.fault import Fault, host_fault
from runtime.kv.kv_cache import KVCache
from runtime.platform.platform import DeviceMemory
from runtime.runner.device_inputs import DeviceInputs
from runtime.runner.lane import Launched, Part
from runtime.runner.runner import ModelRunner, NoGraphs
from runtime.runner.warmup import next_tokens, prompts
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler


class Passed:
    async def wait(self) -> None:
        await asyncio.sleep(0)


class LoopLane:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.num_steps = 0

    def begin(self, work: Callable[[], Any], *, opens: bool = True) -> Part:
        value = work()
        return Part(lambda: value, Passed)

    def finish(self, work: Callable[[], Any], behind: Part | None = None, *, brief: bool = False) -> Launched:
        value = work()
        self.num_steps += 1
        return Launched(lambda: value, Passed(), lambda: None)

    def ids_to_host(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.clone()

    def reader(self, read: Callable[[], Any]) -> Callable[[], Any]:
        return read

    def synchronize(self) -> None:
        pass

    def fault(self, error: BaseException) -> Fault:
        return host_fault(error)

    async def close(self) -> bool:
        return await self._worker.close()

    def stop(self) -> None:
        pass


class TinyPlatform:
    name, device = "tiny", "cpu"

    def __init__(self) -> None:
        self.called: list[str] = []

    def missing(self) -> str | None:
        return None

    def describe(self) -> str:
        return "a tiny device"

    def refuse(self, config: EngineConfig) -> None:
        if config.kv_cache_dtype != "auto":
            raise PlanError("kv-cache-dtype is not for a tiny device")
        self.called.append("refuse")

    def force_kernels(self, config: EngineConfig) -> None:
        ops.force("reference")
        self.called.append("force_kernels")

    def topology(self, devices):
        return ""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 22, 1 << 23)

    def weights_bytes(self, config, spec, stored_bytes) -> int:
        return spec.weights_bytes("float32")

    def plan(self, config, spec, stored_bytes) -> EnginePlan:
        self.called.append("plan")
        return EnginePlan.resolve(
            config, dtype="float32", layers=spec.memory_kinds(), model_len=spec.max_model_len,
            defaults=DeviceDefaults("float32", 3, 24, lambda free: free), free_bytes=self.memory().free,
        )  # fmt: skip

    def compile_ahead(self, plan: EnginePlan) -> None:
        self.called.append("compile_ahead")

    def first_items(self, encoder, plan):
        return []

    def out_of_memory_is(self, option: str):
        return nullcontext()

    def build_runner(self, config, plan, model, eos_token_ids, worker, report):
        self.called.append("build_runner")
        place = torch.device(self.device)
        cache = KVCache(plan.layout, plan.num_kv_blocks, place)
        inputs = DeviceInputs(
            plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.layout, plan.steps_in_flight,
            place, cache.layers,
        )  # fmt: skip
        sampler = Sampler(model.spec.vocab_size, eos_token_ids, plan.max_num_seqs, place)
        self.lane = LoopLane(worker)
        runner = ModelRunner(model, cache, inputs, sampler, self.lane, NoGraphs())
        batch = prompts([5, 9], plan.layout, plan.num_kv_blocks)
        runner.run(batch)
        runner.run(next_tokens(batch))
        return runner, plan
