"""Sampling defaults from a model's own files, and what a seed becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.api import SamplingParams
from server.generate.sampling import for_choice
from server.models.defaults import sampling_defaults


def test_a_generation_config_sets_what_it_names_and_nothing_else():
    config = {"temperature": 0.7, "top_k": 50.0, "do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 5}
    assert sampling_defaults(config) == replace(sampling_defaults(), temperature=0.7, top_k=50)
    assert sampling_defaults({}) == sampling_defaults()


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"temperature": "0.7"}, {"temperature": True}, {"top_p": 0},
        {"top_p": 2}, {"top_k": -5}, {"min_p": float("inf")}, {"repetition_penalty": 0}, {"temperature": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_there_is_left_out_and_logged(config, caplog):
    assert sampling_defaults(config) == sampling_defaults()
    assert next(iter(config)) in caplog.text


@pytest.mark.parametrize(
    ("seed", "choice", "expected"),
    [(None, 3, None), (5, 0, 5), (5, 2, 7), (-1, 1, 0), (2**63 - 1, 1, -(2**63)), (-(2**63), 0, -(2**63))],
)
def test_every_choice_has_a_seed_of_its_own_within_64_bits(seed, choice, expected):
    assert for_choice(SamplingParams(max_tokens=1, seed=seed), choice).seed == expected
