"""The reference of the sampling op: its noise, its filters against a full sort in float64, and what it writes back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from ops.sampling import noise, reference
from ops.sampling import tables as t
from tests.ops.sampling_case import RowParams, fill

V = 50


def logits(seed=0, lines=1, scale=2.0, vocab_size=V) -> torch.Tensor:
    return torch.randn(lines, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draws(scores: torch.Tensor, params: RowParams, num: int, first: int = 0) -> np.ndarray:
    """`num` ids of one row over the same logits, a position each."""
    tables, last_ids = fill([params], len(scores)), torch.zeros(1, dtype=torch.int64)
    rows = torch.zeros(num, dtype=torch.int32)
    positions = torch.arange(first, first + num)
    return reference.sample(scores.expand(num, -1).clone(), rows, positions, last_ids, tables).numpy()


def distribution(scores: torch.Tensor, params: RowParams) -> np.ndarray:
    """Temperature, min-p, top-k, top-p by their definitions, by a full sort. For logits that all differ."""
    weights = np.exp((scores.double() / params.temperature).numpy())
    probs = weights / weights.sum()
    keep = probs >= params.min_p * probs.max()
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        probs[order[params.top_k :]] = 0
        probs /= probs.sum()
    reached = np.cumsum(probs[order]) >= params.top_p - 1e-12
    if params.top_p < 1.0:
        probs[order[int(np.argmax(reached)) + 1 :]] = 0
        probs /= probs.sum()
    return probs


def assert_follows(ids: np.ndarray, wanted: np.ndarray) -> None:
    num = len(ids)
    counts = np.bincount(ids, minlength=len(wanted))
    assert counts[wanted == 0].sum() == 0
    likely = wanted * num >= 5  # the chi-square approximation wants no smaller cells: pool the rest
    observed, expected = counts[likely], wanted[likely] * num
    if (~likely & (wanted > 0)).any():
        observed = np.append(observed, counts[~likely].sum())
        expected = np.append(expected, wanted[~likely].sum() * num)
    if len(observed) > 1:
        assert stats.chisquare(observed, expected * num / expected.sum()).pvalue > 1e-3  # fixed seeds: no false alarms


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_p": 0.8},
    {"top_k": 10, "top_p": 0.6, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 1000},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drawn_frequencies_match_the_distribution(filters):
    params = RowParams(seed=11, **filters)
    scores = logits(1)[0]
    assert_follows(draws(scores, params, 2000), distribution(scores, params))


def test_a_filtered_vocabulary_of_real_size_keeps_what_a_full_sort_keeps():
    scores = logits(3, vocab_size=20_000, scale=3.0)[0]
    for filters in FILTERS[2:]:
        params = RowParams(**filters)
        record = fill([params], len(scores)).records[0]
        record = reference._Record(record.tolist(), record.view(torch.float32).tolist())
        left_in = (scores >= reference.threshold(scores, record, float(scores.max()))).numpy()
        assert (left_in == (distribution(scores, params) > 0)).all(), filters


def test_all_of_equal_logits_are_kept_or_none():
    scores = torch.zeros(V)
    scores[[4, 9, 30]] = 2.0
    for filters in ({"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}):
        assert set(draws(scores, RowParams(**filters), 200)) == {4, 9, 30}


def test_noise_is_gumbel_for_every_seed_position_and_token():
    ids = torch.arange(1000, dtype=torch.int32)
    by_token = noise.gumbel(100_000, noise.noise_keys(5, 0, 7)).numpy()
    by_position = np.concatenate([noise.gumbel(ids[:1], noise.noise_keys(5, 0, p)).numpy() for p in range(4000)])
    by_seed = np.concatenate([noise.gumbel(ids[:1], noise.noise_keys(s, 0, 5)).numpy() for s in range(4000)])
    by_high_word = np.concatenate([noise.gumbel(ids[:1], noise.noise_keys(0, s, 5)).numpy() for s in range(4000)])
    for numbers in (by_token, by_position, by_seed, by_high_word):
        assert stats.kstest(numbers, "gumbel_r").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.05
    next_line = noise.gumbel(100_000, noise.noise_keys(5, 0, 8)).numpy()
    assert abs(np.corrcoef(by_token, next_line)[0, 1]) < 0.02


def test_a_tokens_noise_is_the_same_whoever_else_is_asked_for():
    keys = noise.noise_keys(-1, 2**31 - 1, 123)
    some = torch.tensor([70_000, 3, 99_999], dtype=torch.int32)
    assert torch.equal(noise.gumbel(100_000, keys)[some.long()], noise.gumbel(some, keys))


def test_the_largest_noise_of_a_vocabulary_is_gumbel_too():
    """The tail is where rare tokens win; 24 bits would end it at 16.6."""
    largest = [float(noise.gumbel(100_000, noise.noise_keys(1, 0, p)).max()) for p in range(500)]
    assert stats.kstest(np.array(largest) - math.log(100_000), "gumbel_r").pvalue > 1e-3
    assert max(largest) > 17


def test_a_rare_token_is_drawn_as_often_as_it_should():
    scores = torch.zeros(2)
    scores[1] = math.log(1e-2)
    share = (draws(scores, RowParams(seed=3), 8000) == 1).mean()
    assert stats.binomtest(round(share * 8000), 8000, 1e-2 / 1.01).pvalue > 1e-3


def test_the_lowest_of_equal_logits_is_the_largest():
    scores = torch.zeros(1, 1000)
    scores[0, [700, 600, 601]] = 1.0
    assert draws(scores[0], RowParams(temperature=0), 1) == [600]


def test_a_line_that_does_not_sample_leaves_no_trace():
    params_by_row = [
        RowParams(presence=1.0, temperature=0.0),
        RowParams(temperature=0.0),
        RowParams(presence=1.0, seed=1),
    ]
    tables, last_ids = fill(params_by_row, V), torch.full((3,), 44)
    rows = torch.tensor([1, -1, -1], dtype=torch.int32)
    scores = logits(1, lines=3)
    ids = reference.sample(scores.clone(), rows, torch.tensor([5, 5, 0]), last_ids, tables)
    assert ids[0] == scores[0].argmax()
    assert last_ids.tolist() == [44, int(ids[0]), 44]
    assert not tables.counts.any()


def test_no_lines_give_no_ids():
    tables, last_ids = fill([RowParams()], V), torch.zeros(1, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int32)
    assert reference.sample(torch.zeros(0, V), nothing, nothing.long(), last_ids, tables).tolist() == []


def test_a_count_stops_instead_of_wrapping():
    tables, last_ids = fill([RowParams(frequency=0.0001, temperature=0.0)], V), torch.zeros(1, dtype=torch.int64)
    tables.counts[0, 7] = t.MAX_COUNT - 1
    scores = torch.zeros(1, V)
    scores[0, 7] = 100.0
    for _ in range(3):
        reference.sample(scores.clone(), torch.zeros(1, dtype=torch.int32), torch.tensor([5]), last_ids, tables)
    assert tables.counts[0, 7] == t.MAX_COUNT
    assert tables.counts[0].count_nonzero() == 1


def test_huge_logits_over_a_small_temperature_stay_usable():
    for scores in (torch.tensor([-3e38, -2e38, -1e38]), torch.tensor([1e38, 3e38, -torch.inf])):
        ids = draws(scores, RowParams(temperature=0.01), 5)
        assert (ids >= 0).all()
        assert (ids != int((scores == -torch.inf).nonzero()[0])).all() if (scores == -torch.inf).any() else True


def test_seeds_of_all_64_bits_count():
    scores = torch.zeros(1000)
    chosen = [draws(scores, replace(RowParams(), seed=seed), 8).tolist() for seed in (0, 1, -1, 2**32, 2**62, -(2**63))]
    assert len({tuple(ids) for ids in chosen}) == len(chosen)


def by_sorting_all(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """The least logit that top-k, top-p and min-p keep."""
    largest = scores.max()
    lowest = float(largest + (temperature * math.log(min_p) if min_p else -math.inf))
    values = scores.sort(descending=True).values
    if top_k:
        lowest = max(lowest, float(values[min(top_k, len(values)) - 1]))
    values = values[values >= lowest]
    if top_p < 1:
        masses = torch.exp((values - largest) / temperature).cumsum(0, dtype=torch.float64)
        return float(values[int(torch.searchsorted(masses, top_p * masses[-1]))])
    return lowest if min_p or top_k else -math.inf


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize(
    "kept", [(50, 1.0, 0.0), (0, 0.95, 0.0), (0, 0.2, 0.0), (2000, 0.999, 0.0), (7, 0.5, 0.01), (0, 0.9, 0.02)]
)
def test_what_is_kept_is_what_sorting_all_logits_would_keep(spread, kept):
    top_k, top_p, min_p = kept
    generator = torch.Generator().manual_seed(5)
    for temperature in (0.5, 1.0):
        scores = torch.randn(3000, generator=generator) * spread
        scores[::7] = scores[3]  # equals
        margin = temperature * math.log(min_p) if min_p else -math.inf
        words, floats = [0] * t.RECORD, [0.0] * t.RECORD
        words[t.TOP_K], floats[t.TOP_P], floats[t.MIN_P_MARGIN] = top_k, top_p, margin
        floats[t.INVERSE_TEMPERATURE] = 1 / temperature
        found = reference.threshold(scores, reference._Record(words, floats), float(scores.max()))
        expected = by_sorting_all(scores, temperature, top_k, top_p, min_p)
        assert torch.equal(scores >= found, scores >= expected)
