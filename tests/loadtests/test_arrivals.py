"""When requests arrive."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from loadtests.arrivals import Bursts, Poisson, Ramp, Replay, parse


def moments(arrivals, count: int = 20_000) -> list[float]:
    found = arrivals.moments_s(count, random.Random(3))
    assert (len(found), found[0]) == (count, 0.0)
    assert found == sorted(found)
    assert found == arrivals.moments_s(count, random.Random(3))
    return found


@pytest.mark.parametrize(
    ("text", "arrivals", "rate_per_s"),
    [
        ("poisson:4", Poisson(4.0), 4.0),
        ("poisson:4:0.5", Poisson(4.0, 0.5), 4.0),
        ("bursts:32:8", Bursts(32, 8.0), 4.0),
        ("ramp:1:7", Ramp(1.0, 7.0), 4.0),
    ],
)
def test_arrivals_are_read_from_a_word(text, arrivals, rate_per_s):
    assert parse(text) == arrivals
    assert parse(text).rate_per_s == rate_per_s


@pytest.mark.parametrize(
    "text",
    ["", "poisson", "poisson:0", "poisson:x", "poisson:1:0", "poisson:nan", "poisson:inf", "bursts:0:1", "bursts:1.5:1",
     "bursts:4:0", "ramp:1", "ramp:0:1", "ramp:1:inf", "never:1"],
)  # fmt: skip
def test_what_are_no_arrivals_is_refused(text):
    with pytest.raises(ValueError, match=r"poisson|must be positive|bursts have"):
        parse(text)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_spreads_the_gaps_and_keeps_the_rate(burstiness, variation):
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments(Poisson(5.0, burstiness)))]
    # A gamma's deviation over its mean is 1 / sqrt(shape). The standard error of both is under 2 % of 20,000 gaps.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.08)


def test_bursts_come_at_once_and_in_time():
    assert Bursts(3, 2.0).moments_s(7, random.Random(0)) == [0, 0, 0, 2, 2, 2, 4]


@pytest.mark.parametrize(("first", "last"), [(1.0, 9.0), (9.0, 1.0), (5.0, 5.0)])
def test_a_ramp_begins_at_one_rate_and_ends_at_the_other(first, last):
    found = moments(Ramp(first, last))
    duration_s = 20_000 / 5.0
    assert found[-1] == pytest.approx(duration_s, rel=0.1)
    for begin, rate in ((0.0, first), (duration_s * 0.9, last)):
        number = sum(begin <= moment < begin + duration_s * 0.1 for moment in found)
        # A tenth of a ramp is 5 % of its way from the end that it begins at; some 700 arrivals at least, so 4 % of deviation.
        expected = (rate + 0.05 * (first + last - 2 * rate)) * duration_s * 0.1
        assert number == pytest.approx(expected, rel=0.15)


def test_a_replay_is_what_was_recorded_and_no_more():
    recorded = Replay((0.0, 0.5, 4.0))
    assert recorded.moments_s(2, random.Random(0)) == [0.0, 0.5]
    assert recorded.rate_per_s == 0.75
    with pytest.raises(ValueError, match="3 requests, not 4"):
        recorded.moments_s(4, random.Random(0))
