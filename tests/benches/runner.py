"""Host time of a decode step in the CPU's runner: everything but the model. `python -m tests.benches.runner`

The model gives the same logits every time. Prints microseconds for 1, 64 and 256 rows, the fifth percentile of many steps:
others may use the machine."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import torch

import ops
from runtime.api import SamplingParams
from runtime.batch import SAMPLE, RowBinding, ScheduledBatch, ScheduledRow
from runtime.kv.block_table import NewBlocks
from runtime.kv.layout import KVLayout
from runtime.platform.worker_lane import WorkerLane
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.runner import ModelRunner, NoGraphs
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler
from tests.kinds import full

VOCAB, STEPS, MAX_LEN = 1000, 2000, 4096
LAYOUT = KVLayout.of((full(1, 8),))


class Constant:
    spec = SimpleNamespace(vocab_size=VOCAB, generates=True)
    encoder = None

    def __init__(self, num_rows: int) -> None:
        self._logits = torch.randn(num_rows, VOCAB)

    def forward(self, step):
        return None

    def compute_logits(self, hidden, tokens=None):
        return self._logits


def runner_of(num_rows: int) -> ModelRunner:
    cpu = torch.device("cpu")
    return ModelRunner(
        Constant(num_rows), SimpleNamespace(layers=()), InputBuffers(num_rows, MAX_LEN, LAYOUT),
        Sampler(VOCAB, frozenset(), num_rows, cpu), WorkerLane(Worker()), NoGraphs(),
    )  # fmt: skip


def step_us(num_rows: int) -> float:
    runner = runner_of(num_rows)
    params = SamplingParams(max_tokens=MAX_LEN, temperature=0.0)
    blocks = tuple(range(MAX_LEN // LAYOUT.block_size))
    binding = RowBinding(params, 0, (1,), ())
    first = tuple(
        ScheduledRow(
            row, row, 0, 1, (1,), new_blocks=(NewBlocks(0, 0, blocks),), work=SAMPLE, binding=binding
        )
        for row in range(num_rows)
    )  # fmt: skip
    runner.whole(ScheduledBatch(first, num_rows, 0))
    taken = []
    for position in range(1, STEPS):
        rows = tuple(ScheduledRow(row, row, position, 1, (), work=SAMPLE) for row in range(num_rows))
        batch = ScheduledBatch(rows, num_rows, 0)
        began_s = time.perf_counter()
        runner.whole(batch).result()
        taken.append(time.perf_counter() - began_s)
    return statistics.quantiles(taken, n=20)[0] * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    ops.set_num_threads(1)
    for num_rows in (1, 64, 256):
        print(f"{num_rows} rows: {step_us(num_rows):.1f} us")
