"""Runners over small models: on a worker's lane with the CPU's inputs, and on a device's lane with a device's inputs.

The device's lane runs on the CPU here, where an event has passed when it is recorded, with Triton's kernels interpreted or by the
references."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

import ops
from ops.inputs import triton_unpack
from runtime.kv.kv_cache import KVCache
from runtime.kv.layout import KVLayout
from runtime.platform.captured_steps import CapturedSteps
from runtime.platform.cuda_lane import CudaLane
from runtime.platform.graph_pool import Captured, Follow, GraphPool
from runtime.platform.worker_lane import WorkerLane
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.drafter import Round
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.runner import ModelRunner, NoGraphs
from runtime.runner.worker import Worker
from runtime.sample.sampler import Sampler
from runtime.sample.synthetic import SyntheticAcceptance
from runtime.speculate.config import LookupLengths
from tests.kinds import full

LANES = ["worker", "device", "replayed"]  # the last: a device's, with steps padded as captured ones are
VOCAB = 40
LAYOUT = KVLayout.of((full(1, 8),), 4)
CPU = torch.device("cpu")


class PassedEvent:
    def __init__(self, **options) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PassedEvent) -> float:
        return 1e3 * (other.at - self.at)


class Successor:
    """A model that finds the id behind the last one likeliest, and the next ones less and less."""

    spec = SimpleNamespace(vocab_size=VOCAB, generates=True)
    encoder = None

    def forward(self, step):
        return step.input_ids.clone()

    def compute_logits(self, hidden, tokens=None):
        ids = hidden if tokens is None else hidden[tokens]
        return -(((torch.arange(VOCAB) - ids[:, None] - 1) % VOCAB).float())


class NoCache:
    """Of a model that keeps nothing. Notes what it was to copy."""

    layers = ()

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []

    def copy_blocks(self, sources, targets) -> None:
        self.copies += zip(sources.tolist(), targets.tolist(), strict=True)


class UncapturedPool(GraphPool):
    """Computes what it would have captured when it is replayed, with nothing known of it but its shape."""

    compute: Callable[[StepShape], tuple[Captured, Follow | None]]

    def __init__(self, max_num_seqs: int, max_num_tokens: int, *, pools: bool = False) -> None:
        super().__init__(max_num_seqs, max_num_tokens, drafts=not pools, pools=pools)
        self.replayed: list[StepShape] = []

    def find(self, wanted: StepShape) -> StepShape | None:
        self._graphs = dict.fromkeys(self.shapes)
        return super().find(wanted)

    def replay(self, shape: StepShape) -> Captured:
        self.replayed.append(shape)
        captured, self._follow = self.compute(shape)
        return captured

    def replay_following(self, shape: StepShape) -> None:
        if self._follow is not None:
            self._follow()


class PaddedRounds:
    """Computes rounds of guesses as they are captured: for more rows than want one."""

    def __init__(self, one: Round, max_num_seqs: int) -> None:
        self._round, self._max_num_seqs = one, max_num_seqs

    def replay(self, num_rows: int) -> bool:
        self._round.compute(min(num_rows + 1, self._max_num_seqs))
        return True


def make_runner(
    lane: str, model, monkeypatch, *, cache: NoCache | KVCache | None = None, layout: KVLayout = LAYOUT, rows=4,
    max_model_len=64, vocab_size=VOCAB, synthetic: float | None = None, max_proposed=0,
    lookup: LookupLengths | None = None, pools: bool = False,
) -> ModelRunner:  # fmt: skip
    cache = cache or NoCache()
    chance = None if synthetic is None else SyntheticAcceptance(synthetic, CPU)
    sampler = Sampler(vocab_size, frozenset(), rows, CPU, chance)
    if lane == "worker":
        inputs = InputBuffers(rows, max_model_len, layout, cache.layers, max_proposed)
        return ModelRunner(model, cache, inputs, sampler, WorkerLane(Worker()), NoGraphs(), lookup)
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    monkeypatch.setattr(ops, "unpack", triton_unpack.unpack)
    monkeypatch.setattr(ops, "place_tokens", triton_unpack.place_tokens)
    monkeypatch.setattr(ops, "place_behind", triton_unpack.place_behind)
    inputs = DeviceInputs(rows, 4 * max_model_len, max_model_len, layout, 2, CPU, cache.layers, max_proposed)
    pool = UncapturedPool(rows, 4 * max_model_len, pools=pools) if lane == "replayed" else GraphPool(1, 2)
    steps = CapturedSteps(inputs, pool)
    runner = ModelRunner(model, cache, inputs, sampler, CudaLane(rows, 2, CPU), steps, lookup, pools=pools)
    for each in runner.drafter.rounds if lane == "replayed" else ():
        each.graphs = PaddedRounds(each, rows)

    def compute(shape: StepShape) -> tuple[Captured, Follow | None]:
        sampled, hidden, follow = runner.capturable(inputs.placed(shape, None))
        return Captured(sampled, hidden), follow

    pool.compute = compute
    return runner
