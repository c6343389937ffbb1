"""Guesses among logits rows: whatever they are worth, a row gains what it draws one by one, and its counts say so.

The reference, the native op and Triton's kernels, on the CPU by Triton's interpreter and on a GPU for real."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from ops.native import module
from ops.sampling import native, reference, triton_sample
from ops.sampling import tables as t
from ops.sampling.tables import Drafts, Masks, SamplingTables
from tests.ops.places import DEVICES
from tests.ops.sampling_case import RowParams, fill
from tests.tiers import on_push

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

V, NUM_TOKENS, FIRST = 70, 5, 30  # FIRST: the position of a row's first draw
PARAMS = [
    RowParams(temperature=0.0),
    RowParams(temperature=0.9, seed=4),
    RowParams(temperature=0.0, frequency=0.7, presence=0.4, prompt=(3, 4), outputs=(5, 5)),
    RowParams(temperature=1.3, repetition=1.4, frequency=0.2, seed=11, top_p=0.9, prompt=(9, 8)),
    RowParams(temperature=0.8, presence=1.1, min_p=0.02, seed=-2),
    RowParams(temperature=1.0, bias={2: 2.0, 60: 3.0}, bans=(2, 60), free_from=FIRST + 4, top_k=20, seed=6),
    RowParams(temperature=1.0, allowed=(1, 31, 32, 69), frequency=1.5, seed=7),
]
RUNS = [
    pytest.param(reference.sample, "cpu", id="reference"),
    pytest.param(
        native.sample, "cpu", id="native", marks=pytest.mark.skipif(module is None, reason="there is no native module")
    ),
    *(
        pytest.param(triton_sample.sample, place.values[0], id=f"triton-{place.values[0]}", marks=place.marks)
        for place in DEVICES
    ),
]


def scores_behind(row: int, position: int, last_id: int) -> torch.Tensor:
    """Logits [V] which depend on where they stand and on the token before: few tokens are likely, and others behind each."""
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(1000 * row + 10 * position + last_id % 3))


class Told(NamedTuple):
    ids: list[list[int]]  # that each row gained
    counts: torch.Tensor
    last_ids: list[int]
    num_lost: list[int]  # guesses computed for nothing


def generate(run, device: str, guess: Callable[[int, int], list[int]] | None) -> Told:
    """Rows draw at their own pace until each has NUM_TOKENS. `guess`: of a row that has so many."""
    tables = fill(PARAMS, V, device)
    last_ids = torch.full((len(PARAMS),), 5, device=device)
    num_computed = torch.zeros(len(PARAMS), dtype=torch.int32, device=device)
    ids: list[list[int]] = [[] for _ in PARAMS]
    while rows := [row for row in range(len(PARAMS)) if len(ids[row]) < NUM_TOKENS]:
        guesses = [guess(row, len(ids[row]))[: NUM_TOKENS - len(ids[row]) - 1] if guess else [] for row in rows]
        drawn = _step(run, device, tables, last_ids, num_computed, rows, guesses, ids)
        for row, mine, all_drawn in zip(rows, guesses, drawn, strict=True):
            right = next(
                (i for i, pair in enumerate(zip(mine, all_drawn, strict=False)) if pair[0] != pair[1]), len(mine)
            )
            ids[row] += all_drawn[: right + 1]
    counts = torch.where(tables.counts.cpu() == 0, 0, tables.counts.cpu() & t.MAX_COUNT)
    return Told(ids, counts, last_ids.tolist(), (-num_computed).tolist())


def _step(
    run, device: str, tables: SamplingTables, last_ids: torch.Tensor, num_computed: torch.Tensor, rows: list[int],
    guesses: list[list[int]], ids: list[list[int]],
) -> list[list[int]]:  # fmt: skip
    scores, owners, positions, behind = [], [], [], []
    for row, mine in zip(rows, guesses, strict=True):
        before = [ids[row][-1] if ids[row] else 0, *mine]
        for offset, last_id in enumerate(before):
            position = FIRST + len(ids[row]) + offset
            scores.append(scores_behind(row, position, last_id))
            owners.append(row)
            positions.append(position)
            behind.append(mine[offset - 1] if offset else -1)
    drafts = Drafts(torch.tensor(behind, device=device), num_computed)
    found = run(
        torch.stack(scores).to(device), torch.tensor(owners, dtype=torch.int32, device=device),
        torch.tensor(positions, device=device), last_ids, tables, drafts if any(guesses) else None,
    ).tolist()  # fmt: skip
    taken = iter(found)
    return [[next(taken) for _ in range(len(mine) + 1)] for mine in guesses]


@pytest.fixture(scope="module")
def alone() -> Told:
    return generate(reference.sample, "cpu", None)


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("share", on_push([0.0, 0.7, 1.0], 0.7))
def test_rows_gain_what_they_draw_one_by_one(run, device, share, alone):
    chance, num_guesses = random.Random(int(share * 10)), 0

    def guess(row: int, num: int) -> list[int]:
        nonlocal num_guesses
        right = alone.ids[row][num : num + chance.randrange(6)]
        mine = [token if chance.random() < share else chance.randrange(V) for token in right]
        num_guesses += len(mine[: NUM_TOKENS - num - 1])
        return mine

    found = generate(run, device, guess)
    assert found.ids == alone.ids
    assert torch.equal(found.counts, alone.counts)
    assert found.last_ids == alone.last_ids == [ids[-1] for ids in alone.ids]
    assert (sum(found.num_lost) == 0) == (share == 1.0)
    assert sum(found.num_lost) <= num_guesses


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_what_is_counted_are_the_draws_that_a_row_gains(run, device):
    """Six logits rows of one row, greedy: the largest logit is token 1, then 2, 3, ...; of its guesses the first two are right."""
    params = RowParams(temperature=0.0, presence=0.5)
    tables, last_ids = fill([params, params], V, device), torch.zeros(2, dtype=torch.int64, device=device)
    scores = torch.zeros(6, V)
    scores[range(6), range(1, 7)] = 9.0
    drafts = Drafts(torch.tensor([-1, 1, 2, 40, 4, 5], device=device), torch.tensor([0, 10], device=device))
    rows, positions = torch.ones(6, dtype=torch.int32, device=device), torch.arange(6, device=device)
    ids = run(scores.to(device), rows, positions, last_ids, tables, drafts)
    assert ids[:3].tolist() == [1, 2, 3]
    assert last_ids.tolist() == [0, 3]
    assert drafts.num_computed.tolist() == [0, 10 - 3]
    assert tables.counts[1].nonzero()[:, 0].tolist() == [1, 2, 3]
    assert not tables.counts[0].any()


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_end_what_a_row_gains(run, device, temperature):
    tables = fill([RowParams(temperature=temperature, allowed=(1, 2)), RowParams(temperature=0.0)], V, device)
    scores = torch.zeros(5, V)
    scores[[0, 2, 3, 4], 1] = 50.0
    scores[1] = torch.nan
    last_ids, num_computed = torch.full((2,), 9, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    rows = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=device)
    drafts = Drafts(torch.tensor([-1, 1, 1, -1, 1], device=device), num_computed)
    ids = run(scores.to(device), rows, torch.arange(5, device=device), last_ids, tables, drafts).tolist()
    assert ids[:2] == [1, t.NOT_FINITE]
    assert ids[3:] == [1, 1]
    assert last_ids.tolist() == [0, 1]  # what is not finite is no input
    assert num_computed.tolist() == [-1, 0]


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_gains_nothing_behind_what_it_does_not_ask_for(run, device, temperature):
    """Neither where it asks for nothing at all, nor where it asks for some of its logits rows, the first of them."""
    params = RowParams(temperature=temperature, allowed=(1,), frequency=0.1)
    tables = fill([params, params], V, device)
    last_ids, num_computed = torch.full((2,), 9, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    rows = torch.tensor([-1, -1, 1, 1, -1], dtype=torch.int32, device=device)
    drafts = Drafts(torch.tensor([-1, 1, -1, 1, 1], device=device), num_computed)
    ids = run(torch.zeros(5, V, device=device), rows, torch.arange(5, device=device), last_ids, tables, drafts)
    assert ids[2:4].tolist() == [1, 1]
    assert last_ids.tolist() == [9, 1]
    assert num_computed.tolist() == [0, -1]
    assert tables.counts[:, 1].tolist() == [0, 2]


@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_logits_row_has_a_mask_of_its_own(run, device, temperature):
    """Row 1 may draw token 2, behind it 40, and then no more; row 0 is not masked by what the tables have of it."""
    params = RowParams(temperature=temperature, allowed=(60,), presence=0.2)
    tables, last_ids = fill([params, params], V, device), torch.zeros(2, dtype=torch.int64, device=device)
    words = torch.zeros(3, -(-V // 32), dtype=torch.int32)
    for mask, token in enumerate((2, 40, 5)):
        words[mask, token // 32] = 1 << token % 32
    drafts = Drafts(torch.tensor([-1, 2, 40, -1], device=device), torch.zeros(2, dtype=torch.int32, device=device))
    masks = Masks(torch.tensor([0, 1, 0, 2], dtype=torch.int32, device=device), words.to(device))
    rows, positions = torch.tensor([1, 1, -1, 0], dtype=torch.int32, device=device), torch.arange(4, device=device)
    scores = torch.randn(4, V, generator=torch.Generator().manual_seed(3)).to(device)
    ids = run(scores, rows, positions, last_ids, tables, drafts, masks).tolist()
    assert [ids[0], ids[1], ids[3]] == [2, 40, 5]
    assert last_ids.tolist() == [5, 40]
    assert drafts.num_computed.tolist() == [0, -1]
