"""What a client asks of the draw, through every kernel that draws: from SamplingParams to ids, against the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from ops.sampling import native, reference
from ops.sampling.tables import SamplingTables
from runtime.api import SamplingParams
from runtime.batch import RowBinding
from runtime.sample.draw import Draw
from runtime.sample.stage import Record
from tests.ops.places import DEVICES
from tests.tiers import on_push

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in Triton's interpreter

DrawFrom = Callable[[Sequence[float], Sequence[SamplingParams], int], list[list[int]]]


def by_native(*arguments) -> torch.Tensor:
    pytest.importorskip("oneloop_native")
    return native.sample(*arguments)


def by_triton(*arguments) -> torch.Tensor:
    from ops.sampling import triton_sample

    return triton_sample.sample(*arguments)


@pytest.fixture(
    params=[
        pytest.param((reference.sample, "cpu"), id="reference"),
        pytest.param((by_native, "cpu"), id="native"),
        *(pytest.param((by_triton, *at.values), marks=at.marks, id=f"triton-{at.values[0]}") for at in DEVICES),
    ]
)
def draw(request: pytest.FixtureRequest) -> DrawFrom:
    """`draw(scores, params, n)`: what each of the params draws from the same scores [V] at n positions."""
    run, device = request.param

    def draw(scores: Sequence[float], params: Sequence[SamplingParams], num: int) -> list[list[int]]:
        tables = SamplingTables.empty(len(params), len(scores), 1, 1, torch.device(device))
        for row, each in enumerate(params):
            record = Record()
            Draw().bind(row, RowBinding(each, each.seed or 0, (0,), ()), record)
            tables.records[row] = torch.from_numpy(record.words)
        logits = torch.tensor(scores, device=device).repeat(len(params) * num, 1)
        rows = torch.arange(len(params), dtype=torch.int32, device=device).repeat_interleave(num)
        positions = torch.arange(1, num + 1, device=device).repeat(len(params))
        ids = run(logits, rows, positions, torch.zeros(len(params), dtype=torch.int64, device=device), tables)
        return ids.reshape(len(params), num).tolist()

    return draw


@pytest.mark.parametrize(
    ("temperature", "below", "drawn"), [(2.0, 4.0, True), (2.0, 5.0, False), (0.5, 1.7, False), (0.5, 1.1, True)]
)
def test_min_p_is_a_share_of_the_probabilities_after_temperature(draw: DrawFrom, temperature, below, drawn):
    """Others have exp(-below / temperature) of the largest's probability each: more than 0.1, or less."""
    assert (math.exp(-below / temperature) >= 0.1) is drawn
    (ids,) = draw([0.0, *[-below] * 299], [SamplingParams(1, temperature, min_p=0.1, seed=1)], 6)
    assert any(ids) is drawn


@pytest.mark.parametrize("vocab_size", on_push([8, 8300], 8))  # more than Triton's kernel holds in registers
@pytest.mark.parametrize(("top_p", "drawn"), [(0.5, False), (0.500001, True)])
def test_top_p_keeps_no_token_more_once_the_mass_is_met_exactly(draw: DrawFrom, top_p, drawn, vocab_size):
    """At a temperature of 1e12 each token weighs exp(-1e-12), in float32 exactly 1: the higher half of them is half of the mass."""
    half = vocab_size // 2
    (ids,) = draw([1.0] * half + [0.0] * half, [SamplingParams(1, 1e12, top_p=top_p, seed=2)], 6)
    assert (max(ids) >= half) is drawn


def test_each_of_the_64_bits_of_a_seed_counts(draw: DrawFrom):
    seeds = [0, *(1 << bit for bit in range(63)), -(2**63)]
    answers = draw([0.0] * 1000, [SamplingParams(1, seed=seed) for seed in seeds], 3)
    assert len(set(map(tuple, answers))) == len(seeds) == 65
