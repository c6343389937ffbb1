"""The arithmetic, on answers whose figures are known."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.answers import Answer
from loadtests.figures import Run, Slo, percentile, summarise


def answered(ttft_s: float, gap_s: float, num_events: int = 3, num_tokens: int = 3, **fields: object) -> Answer:
    content = tuple(ttft_s + gap_s * index for index in range(num_events))
    return Answer(0.0, content[-1] + 0.5, content, num_tokens, counted_by_usage=True, **fields)  # type: ignore[arg-type]


def run_of(*answers: Answer, num_requested: int | None = None, wall_s: float = 2.0, **fields: object) -> Run:
    return Run(answers, num_requested or len(answers), [3] * len(answers), wall_s, **fields)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_of_nothing_there_is_no_percentile():
    assert percentile([], 50) is None


def test_every_figure_of_a_small_run():
    slow = answered(0.3, 0.1, num_prompt_tokens=10, num_cached_tokens=4)
    figures = summarise(
        run_of(answered(0.1, 0.02, num_prompt_tokens=10), slow, num_requested=2, client_cpu_s=0.5, server_cpu_s=0.0006)
    )
    expected = {
        "requests": 2, "ok": 2, "errors": 0, "wall_s": 2.0, "req_per_s": 1.0, "out_tokens": 6, "out_tok_per_s": 3.0,
        "in_tokens": 20, "cached_in_tokens": 4, "other_length": 0, "tokens_from": "usage", "tokens_per_event": 1.0,
        "ttft_ms_mean": 200.0, "ttft_ms_p50": 200.0, "ttft_ms_p90": 280.0, "ttft_ms_p99": 298.0,
        "tpot_ms_p50": 60.0, "itl_ms_p50": 60.0, "itl_ms_mean": 60.0,
        "e2e_ms_p50": 820.0, "client_cpu_share": 0.25, "server_cpu_us_per_token": 100.0,
    }  # fmt: skip
    assert {key: figures[key] for key in expected} == expected


def test_errors_and_unfinished_requests_count_and_give_no_tokens():
    figures = summarise(
        run_of(
            answered(0.1, 0.1), Answer(0, 1, error="HTTP 500: a"), Answer(0, 1, error="HTTP 500: a"), num_requested=5
        )
    )
    assert (figures["ok"], figures["errors"], figures["out_tokens"]) == (1, 4, 3)
    assert figures["error_counts"] == {"HTTP 500: a": 2, "not finished when the time for the run was over": 2}


def test_a_run_in_which_everything_failed_has_no_latencies():
    figures = summarise(run_of(Answer(0, 1, error="x")))
    assert (figures["ttft_ms_p50"], figures["out_tok_per_s"], figures["tokens_per_event"]) == (None, 0, None)


def test_answers_of_another_length_than_requested_are_counted():
    assert summarise(run_of(answered(0.1, 0.1, num_tokens=2), answered(0.1, 0.1)))["other_length"] == 1


@pytest.mark.parametrize(
    ("terms", "good"),
    [
        (["ttft:150"], 1),
        (["ttft:150", "tpot:10"], 0),
        (["tpot:100"], 2),
        (["itl:50"], 1),
        (["e2e:2000"], 2),
        (["e2el:2000"], 2),
        (["ttft:50"], 0),
    ],
)
def test_goodput_counts_answers_within_every_limit(terms, good):
    run = run_of(answered(0.1, 0.02), answered(0.3, 0.1), Answer(0, 1, error="x"), num_requested=4)
    figures = summarise(run, Slo.parse(terms))
    assert figures["goodput_req_per_s"] == good / 2
    assert figures["good_share"] == good / 4


@pytest.mark.parametrize("term", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "speed:5", ":5"])
def test_an_slo_that_makes_no_sense_is_refused_by_its_text(term):
    with pytest.raises(ValueError, match="METRIC:MILLISECONDS"):
        Slo.parse([term])
