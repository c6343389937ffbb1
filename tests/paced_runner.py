"""PacedRunner: everything of a device's step that the host does, and no device: for what the loop costs at some pace.

Rows are arranged and packed as for a GPU; ids are a text's, over and over; a step of n rows takes n * `row_s`, and the
loop's turns that it takes to hand its tokens over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from runtime.batch import ScheduledBatch
from runtime.engine import Engine
from runtime.engine.admission import AdmissionLimits
from runtime.fault import Fault, host_fault
from runtime.kv.block_pool import BlockPool
from runtime.kv.layout import BLOCK_SIZE, KVLayout
from runtime.kv.prefix_cache import PrefixCache
from runtime.platform.captured_steps import serves
from runtime.policy.fairness import POLICIES
from runtime.runner.device_inputs import DeviceInputs
from runtime.runner.runner import read_result
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.step import ForwardOutput, Step
from tests.fake_runner import model_info
from tests.kinds import full

_ROWS_A_TURN = 64  # whose tokens are handed over in one turn of the loop


class _Inputs(DeviceInputs):
    def _unpack(self, *packed) -> None:
        """Nobody reads it."""


class _Due:
    def __init__(self, at_s: float, turns: int) -> None:
        self._at_s, self._turns = at_s, turns

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if self._at_s > loop.time():
            future = loop.create_future()
            loop.call_at(self._at_s, future.set_result, None)
            await future


class PacedRunner:
    def __init__(self, ids: Sequence[int], max_num_seqs: int, max_model_len: int, row_s: float) -> None:
        layout = KVLayout.of((full(1, 8),))
        self._inputs = _Inputs(max_num_seqs, 8192, max_model_len, layout, 2, torch.device("cpu"))
        self._ids, self._row_s = ids, row_s
        self._ends_s = 0.0

    def encode(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        return []

    def launch(self, batch: ScheduledBatch) -> Step:
        rows = self._inputs.arranged(batch.rows)
        shape = self._inputs.shape_of(rows)
        assert serves(rows)
        self._inputs.upload(rows, shape)
        ids = torch.tensor([self._ids[row.end % len(self._ids)] for row in rows])
        self._ends_s = max(self._ends_s, asyncio.get_running_loop().time()) + len(rows) * self._row_s
        spans = range(len(rows)), range(1, len(rows) + 1)
        return Step(
            batch,
            _Due(self._ends_s, 2 + len(rows) // _ROWS_A_TURN),
            lambda: read_result(batch, rows, spans, ids, None, None, None),
        )

    def capture_next(self, *, idle: bool) -> None:
        return None

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        raise NotImplementedError

    def fault(self, error: BaseException) -> Fault:
        return host_fault(error)

    async def close(self) -> bool:
        return True


def paced_engine(ids: Sequence[int], vocab_size: int, num_rows: int, row_s: float, max_model_len: int = 4096) -> Engine:
    """A real one, which says `ids` over and over."""
    num_blocks = num_rows * max_model_len // BLOCK_SIZE
    model = model_info(
        max_model_len=max_model_len, vocab_size=vocab_size, num_kv_blocks=num_blocks, kv_block_size=BLOCK_SIZE,
        max_num_seqs=num_rows, eos_token_ids=frozenset({0}),
    )  # fmt: skip
    limits = SchedulerLimits(num_rows, 8192, model.eos_token_ids)
    scheduler = Scheduler(limits, BlockPool(num_blocks), PrefixCache(BLOCK_SIZE), POLICIES["fair"]())
    runner = PacedRunner(ids, num_rows, max_model_len, row_s)
    return Engine(scheduler, runner, model, admission=AdmissionLimits(max_queue=num_rows))
