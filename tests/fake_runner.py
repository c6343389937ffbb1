"""FakeRunner: a runner without tensors, whose steps complete when the test says so (or at once)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.api import ModelInfo
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.engine import Engine
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.step import Step


class ManualGpuEvent:
    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_done(self) -> bool:
        return self._future.done()

    async def wait(self) -> None:
        await asyncio.shield(self._future)
        await asyncio.sleep(0)  # a real device lets the loop turn between two steps

    def complete(self, error: Exception | None = None) -> None:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


def count_up(row: ScheduledRow) -> int:
    """The id of a sampled token is its position: easy to expect, whatever was preempted."""
    return row.end


class FakeRunner:
    def __init__(self, sample: Callable[[ScheduledRow], int] = count_up, manual: bool = False) -> None:
        self.sample = sample
        self.manual = manual
        self.events: list[ManualGpuEvent] = []
        self.batches: list[ScheduledBatch] = []
        self.launched = asyncio.Event()
        self.closed = False

    def launch(self, batch: ScheduledBatch) -> Step:
        event = ManualGpuEvent()
        ids = [self.sample(row) for row in batch.sampling_rows]
        self.events.append(event)
        self.batches.append(batch)
        self.launched.set()
        if not self.manual:
            event.complete()
        return Step(batch, event, lambda: ids)

    async def close(self) -> None:
        self.closed = True


def model_info(**changes) -> ModelInfo:
    facts = {
        "architecture": "FakeForCausalLM", "max_model_len": 64, "vocab_size": 1000, "eos_token_ids": frozenset({999}),
        "dtype": "float32", "device": "cpu", "num_parameters": 1, "weights_bytes": 4, "num_kv_blocks": 64,
        "kv_block_size": 4, "kv_cache_bytes": 1, "max_num_seqs": 8,
    }  # fmt: skip
    return ModelInfo(**{**facts, **changes})


def make_engine(runner: FakeRunner, *, num_blocks=64, max_num_seqs=8, budget=32, policy="fcfs", **options) -> Engine:
    limits = SchedulerLimits(max_num_seqs, budget, frozenset({999}))
    scheduler = Scheduler(limits, BlockPool(num_blocks), PrefixCache(4), POLICIES[policy])
    return Engine(scheduler, runner, model_info(max_num_seqs=max_num_seqs, num_kv_blocks=num_blocks), **options)
