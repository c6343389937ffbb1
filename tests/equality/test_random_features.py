"""Twenty random combinations of features, each compared with the plain engine; more by `python -m tests.random_features`."""

from __future__ import annotations

import pytest

from tests.random_features import Draw, Models, refusals, try_draw
from tests.tiers import on_push

SEEDS = range(205, 225)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("seed", on_push(SEEDS, *SEEDS[:6]))
def test_a_random_combination_of_features_generates_what_the_plain_engine_does_or_is_refused_by_name(seed, models):
    try_draw(seed, models)


def test_most_of_the_combinations_start_and_some_are_refused(models):
    refused = sum(bool(refusals(Draw.of(seed), models)) for seed in SEEDS)
    assert 0 < refused < len(SEEDS) / 2
