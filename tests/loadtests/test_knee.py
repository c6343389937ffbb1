"""The knee of a sweep, when it ends, and what is suggested, from canned levels."""

from __future__ import annotations

import pytest

from loadtests.knee import is_saturated, knee_of, suggestions


def level(streams: int, tok_per_s: float, **fields: object) -> dict[str, object]:
    """Closed loop: by Little's law a request takes streams / rate."""
    return {
        "load": streams, "concurrency": streams, "in_flight_mean": float(streams), "rate_per_s": None, "requests": 10, "ok": 10,
        "errors": 0, "out_tok_per_s": tok_per_s, "in_tok_per_s": 1.0, "req_per_s": tok_per_s / 10,
        "e2e_ms_mean": 10_000 * streams / (tok_per_s or 1.0), "itl_ms_p50": 10.0, "itl_ms_p99": 20.0, **fields,
    }  # fmt: skip


CURVE = [level(1, 100), level(2, 195), level(4, 360), level(8, 600), level(16, 700), level(32, 710)]


def test_the_knee_is_where_a_doubling_of_the_streams_stops_to_bring_a_quarter_more():
    assert knee_of(CURVE)["load"] == 8  # 600 / 360 is 1.67, 700 / 600 is 1.17
    assert knee_of([level(1, 50), level(2, 76), level(4, 100), level(8, 129), level(16, 131)])["load"] == 8


def test_the_knee_of_rates_comes_before_the_queue():
    rates = [
        level(1, 100, rate_per_s=1.0, e2e_ms_mean=100.0),
        level(2, 200, rate_per_s=2.0, e2e_ms_mean=110.0),
        level(4, 260, rate_per_s=4.0, e2e_ms_mean=2000.0),
    ]
    assert knee_of(rates)["load"] == 2


def test_nothing_answered_has_no_knee():
    assert knee_of([level(1, 0.0, ok=0, e2e_ms_mean=None)]) is None


def test_with_objectives_the_knee_is_the_greatest_goodput():
    goodputs = [10, 19, 36, 30, 5, 0]
    levels = [each | {"goodput_req_per_s": good} for each, good in zip(CURVE, goodputs, strict=True)]
    assert knee_of(levels)["load"] == 4


@pytest.mark.parametrize(
    ("levels", "why"),
    [
        (CURVE[:4], None),
        (CURVE[:5], None),  # one level alone may have met a slow moment
        ([*CURVE[:4], level(16, 610), level(32, 620)], "1.03 times the throughput of 8"),
        ([level(1, 100, errors=3)], "3 of 10 requests failed"),
        ([level(1, 100, good_share=0.5)], "only 50%"),
        ([level(1, 100, good_share=0.95)], None),
        ([level(4, 100, rate_per_s=20.0, req_per_s=10.0)], "10.0 of 20 requests a second"),
        ([level(4, 100, rate_per_s=20.0, req_per_s=18.0)], None),
    ],
)
def test_more_load_is_tried_until_it_brings_nothing(levels, why):
    found = is_saturated(levels)
    assert (found is None) == (why is None)
    assert (why or "") in (found or "")


def test_levels_beyond_the_knee_speak_for_fewer_sequences():
    [found] = [line for line in suggestions(CURVE) if "--max-num-seqs" in line]
    assert found.startswith("--max-num-seqs 8: ")
    assert "at most 1.18 times, latency up to 3.4 times" in found


def test_throughput_that_is_worth_waiting_for_is_not_given_away():
    """Without objectives nobody knows whether the latency beyond the knee is too much; with them it is."""
    rising = [level(1, 100), level(2, 125), level(4, 150), level(8, 152)]
    assert knee_of(rising)["load"] == 1
    assert not any("--max-num-seqs" in line for line in suggestions(rising))
    goodputs = [each | {"goodput_req_per_s": 10 / each["load"], "slo_ms": {"ttft": 1.0}} for each in rising]
    assert any(line.startswith("--max-num-seqs 1: ") for line in suggestions(goodputs))


def test_a_full_kv_cache_and_a_full_queue_are_named_with_their_counts():
    found = suggestions([*CURVE[:3], level(8, 600, counted={"preemptions": 3.0, "refused": 2.0})])
    assert any("--kv-cache-memory" in line and "3 preemptions" in line for line in found)
    assert any("--max-queue: 2 requests" in line for line in found)


def test_a_queue_before_a_server_that_could_do_more_speaks_for_more_sequences():
    queueing = level(8, 700, counted={"queue_s": 40.0, "e2e_s": 100.0})
    assert any("a larger --max-num-seqs" in line and "40%" in line for line in suggestions([*CURVE[:3], queueing]))


def test_gaps_that_a_reader_sees_speak_for_shorter_steps():
    assert not any("--max-itl" in line for line in suggestions([level(1, 100)]))
    assert any("--max-itl 20: " in line for line in suggestions([level(1, 100, itl_ms_p99=90.0)]))


def test_no_option_is_suggested_where_no_counter_shows_a_bottleneck():
    assert suggestions([level(1, 100)]) == suggestions([level(1, 0.0, ok=0)]) == []
