"""Deferred sampling, in either runner over a model of one table: what waits is sampled as if nothing had come between.

The CUDA runner runs on the CPU here, where an event has passed when it is recorded."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.api import SamplingParams
from runtime.batch import SAMPLE, SAMPLE_MASKED, PromptLogprobsSpan, RowBinding, ScheduledBatch, ScheduledRow
from runtime.constrain.masks import RowMasks, mask_of, num_words
from runtime.kv.layout import KVLayout
from runtime.runner.cpu_runner import CpuRunner
from runtime.runner.cuda_runner import CudaRunner
from runtime.runner.device_inputs import DeviceInputs
from runtime.runner.graph_pool import GraphPool
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler
from tests.kinds import full

VOCAB = 40
LAYOUT = KVLayout.of((full(1, 8),), 4)


class PassedEvent:
    def __init__(self, **options) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: PassedEvent) -> float:
        return 1e3 * (other.at - self.at)


class Successor:
    """A model that finds the id behind the last one likeliest, and the next ones less and less."""

    spec = SimpleNamespace(vocab_size=VOCAB)

    def forward(self, step):
        return step.input_ids.clone()

    def compute_logits(self, hidden, tokens=None):
        ids = hidden if tokens is None else hidden[tokens]
        return -(((torch.arange(VOCAB) - ids[:, None] - 1) % VOCAB).float())


@pytest.fixture(params=["cpu", "cuda"])
def make(request, monkeypatch):
    cpu, cache = torch.device("cpu"), SimpleNamespace(layers=())
    sampler = Sampler(VOCAB, frozenset(), 4, cpu)
    if request.param == "cpu":
        return lambda: CpuRunner(Successor(), cache, sampler, InputBuffers(4, 32, LAYOUT), Worker())
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    inputs = DeviceInputs(4, 32, 32, LAYOUT, steps_in_flight=2, device=cpu)
    return lambda: CudaRunner(Successor(), cache, sampler, inputs, GraphPool(1, 2), max_num_seqs=4, steps_in_flight=2)


def batch_of(*rows: ScheduledRow) -> ScheduledBatch:
    return ScheduledBatch(rows, sum(row.num_tokens for row in rows), 0)


def prompt(row: int, *ids: int, span: PromptLogprobsSpan | None = None, **params) -> ScheduledRow:
    """That is masked in all rows but 0."""
    asked = SamplingParams(8, temperature=0.0, **params)
    binding = RowBinding(asked, 0, ids, (), masked=bool(row))
    return ScheduledRow(
        row, row, 0, len(ids), ids, work=SAMPLE_MASKED if row else SAMPLE, binding=binding, prompt_logprobs=span
    )


def decode(row: ScheduledRow, behind: int) -> ScheduledRow:
    """Its id is on the device."""
    start = row.end + behind
    return row._replace(start=start, num_tokens=1, token_ids=(), binding=None, prompt_logprobs=None)


def masks(allowed: dict[int, set[int]]) -> RowMasks:
    """By row."""
    words = [mask_of(ids, num_words(VOCAB)) for ids in allowed.values()]
    return RowMasks(tuple(allowed), np.array(words, dtype=np.int32).reshape(len(words), num_words(VOCAB)))


async def told(step) -> tuple[list[int], list[list[int] | None], list[list[float]]]:
    """Ids; of those that asked the ids shown beside them; log-probabilities of prompts."""
    result = await step.result()
    ids = [id for (id,) in result.tokens]
    shown = [None if found is None else [id for id, _ in found[0].top] for found in result.logprobs]
    return ids, shown, [[entry.rank for entry in entries] for entries in await step.prompt_logprobs()]


async def test_draws_that_were_kept_come_out_as_if_nothing_had_come_between(make):
    runner = make()
    rows = [
        prompt(0, 3, 4, logprobs=1),
        prompt(1, 10, logprobs=2),
        prompt(2, 20, 21, 22, 24, span=PromptLogprobsSpan(1, (21, 22, 24), 0)),
        prompt(3, 30, 31, 32, frequency_penalty=2.0),
    ]
    first = batch_of(*rows)
    forward = runner.launch_forward(first)
    await forward.done().wait()
    rest, draws = first.split({2, 1})
    kept = forward.snapshot_logits(draws)
    now = forward.sample(rest, masks({3: {33, 38}}))
    assert await told(now) == ([5, 33], [[5], None], [[1, 1, 2]])

    second = batch_of(decode(rows[0], 0))
    assert (await told(runner.launch(second)))[0] == [6]
    third = batch_of(decode(rows[0], 1), decode(rows[3], 0))
    forward = runner.launch_forward(third)
    assert (await told(forward.sample(third, masks({3: {33, 36}}))))[0] == [7, 36]

    assert await told(kept.sample(draws.split({1})[1], masks({1: {9, 13}}))) == ([13], [[11, 12]], [])
    assert await told(kept.sample(draws.split({2})[1], masks({2: {2, 24}}))) == ([2], [], [])
    last = batch_of(decode(rows[0], 2), decode(rows[1], 0), decode(rows[2], 0), decode(rows[3], 1))
    forward = runner.launch_forward(last)
    step = forward.sample(last, masks({row: set(range(VOCAB)) for row in (1, 2, 3)}))
    assert (await told(step))[0] == [8, 14, 3, 37]
    await runner.close()


async def test_a_step_whose_every_mask_is_late_draws_nothing(make):
    runner = make()
    rows = [prompt(1, 10, 11), prompt(2, 20)]
    first = batch_of(*rows)
    forward = runner.launch_forward(first)
    rest, draws = first.split({1, 2})
    kept = forward.snapshot_logits(draws)
    assert await told(forward.sample(rest, masks({}))) == ([], [], [])
    assert (await told(kept.sample(draws, masks({1: {12}, 2: {5, 39}}))))[0] == [12, 39]
    await runner.close()
