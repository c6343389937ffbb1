"""The sampler against plain definitions in float64: every stage, the filters and the distribution of the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from runtime.api import SamplingParams
from runtime.batch import NOT_FINITE, RowBinding
from runtime.sample import draw
from runtime.sample.draw import draw_one, uniform
from runtime.sample.sampler import Sampler

V = 50
EOS = 3


def binding(prompt=(1, 2), output=(), seed=0, **params) -> RowBinding:
    params.setdefault("max_tokens", 99)
    return RowBinding(SamplingParams(**params), seed, tuple(prompt), tuple(output))


def logits(seed=0, rows=1, scale=2.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def distribution(scores: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Temperature, min-p, top-k, top-p by their definitions, by a full sort."""
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


@pytest.mark.parametrize("candidates", [4, 1024], ids=["full sort needed", "selection is enough"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drawn_frequencies_match_the_distribution(filters, candidates, monkeypatch):
    monkeypatch.setattr(draw, "CANDIDATES", candidates)
    params = SamplingParams(max_tokens=1, **filters)
    scores = logits(1)[0]
    wanted = distribution(scores, params)
    n = 4000
    counts = np.bincount([draw_one(scores, params, uniform(11, i)) for i in range(n)], minlength=V)
    assert counts[wanted == 0].sum() == 0
    likely = wanted * n >= 5  # the chi-square approximation wants no smaller cells: pool the rest
    observed, expected = counts[likely], wanted[likely] * n
    if (~likely & (wanted > 0)).any():
        observed = np.append(observed, counts[~likely].sum())
        expected = np.append(expected, wanted[~likely].sum() * n)
    if len(observed) > 1:
        assert stats.chisquare(observed, expected * n / expected.sum()).pvalue > 1e-3  # fixed seeds: no false alarms


def test_uniform_numbers_are_uniform_and_uncorrelated_over_seeds_and_positions():
    by_position = np.array([uniform(5, p) for p in range(4000)])
    by_seed = np.array([uniform(s, 5) for s in range(4000)])
    for numbers in (by_position, by_seed):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.05
    assert uniform(-1, 0) != uniform(0, 0)


def test_a_row_draws_the_same_alone_and_in_any_batch():
    params = {"temperature": 0.9, "top_p": 0.9}
    together, alone = Sampler(V, frozenset({EOS})), Sampler(V, frozenset({EOS}))
    scores = logits(2, rows=3)
    for row in range(3):
        together.bind(row, binding(seed=row, **params))
    alone.bind(7, binding(seed=1, **params))
    for position in range(20):
        batch = together.sample(scores.clone(), [2, 1, 0], [position] * 3)
        single = alone.sample(scores[1:2].clone(), [7], [position])
        assert batch[1] == single[0]


def test_temperature_zero_takes_the_largest_logit_even_beside_a_random_row():
    sampler = Sampler(V, frozenset())
    sampler.bind(0, binding(temperature=0.0))
    sampler.bind(1, binding(temperature=1.0))
    scores = logits(3, rows=2)
    assert sampler.sample(scores.clone(), [0, 1], [5, 5])[0] == scores[0].argmax()


def test_penalties_follow_their_formulas_and_count_what_is_sampled():
    sampler = Sampler(V, frozenset())
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "temperature": 0.0}
    sampler.bind(0, binding(prompt=(1, 2, 2), output=(4, 4), **params))
    scores = logits(4)
    wanted = scores[0].clone()
    for token in (1, 2, 4):
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    wanted[4] -= 0.5 + 2 * 0.25
    got = scores.clone()
    first = int(sampler.sample(got, [0], [5])[0])
    torch.testing.assert_close(got[0], wanted)
    again = scores.clone()
    sampler.sample(again, [0], [6])
    if first not in (1, 2, 4):
        value = scores[0, first]
        assert again[0, first] == pytest.approx(float(value / 1.5 if value > 0 else value * 1.5) - 0.75, abs=1e-5)


def test_logit_bias_adds_and_a_new_tenant_of_the_row_is_free_of_it():
    sampler = Sampler(V, frozenset())
    sampler.bind(0, binding(temperature=0.0, logit_bias={9: 100.0, 8: -100.0}))
    scores = logits(5)
    assert sampler.sample(scores.clone(), [0], [2])[0] == 9
    sampler.bind(0, binding(temperature=0.0))
    assert sampler.sample(scores.clone(), [0], [2])[0] == scores[0].argmax()


@pytest.mark.parametrize(("ignore_eos", "banned"), [(False, {EOS, 8}), (True, {8})])
def test_nothing_that_ends_a_sequence_is_drawn_before_min_tokens(ignore_eos, banned):
    sampler = Sampler(V, frozenset({EOS}))
    sampler.bind(0, binding(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({8}), ignore_eos=ignore_eos))
    for position, free in ((2, False), (3, False), (4, True)):
        scores = torch.zeros(1, V)
        sampler.sample(scores, [0], [position])
        assert {i for i in range(V) if scores[0, i] == -torch.inf} == (set() if free else banned)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_mark_their_row_only(bad, temperature):
    sampler = Sampler(V, frozenset())
    sampler.bind(0, binding(temperature=temperature))
    sampler.bind(1, binding(temperature=0.0))
    scores = logits(6, rows=2)
    scores[0, 11] = bad
    ids = sampler.sample(scores.clone(), [0, 1], [2, 2])
    assert ids.tolist() == [NOT_FINITE, int(scores[1].argmax())]
