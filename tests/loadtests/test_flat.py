"""Whether memory stays flat over requests of distinct lengths."""

from __future__ import annotations

import random

import pytest

from loadtests.__main__ import main
from loadtests.flat import distinct_lengths, slope_mib
from tests.loadtests.test_commands import last_json


def test_no_two_requests_are_of_the_same_lengths():
    pairs = distinct_lengths(20_000, 1000, random.Random(1))
    assert len(set(pairs)) == 20_000
    assert (max(prompt for prompt, _ in pairs), max(output for _, output in pairs)) == (1000, 20)
    assert pairs[:5] != sorted(pairs)[:5]


@pytest.mark.parametrize(("per_request", "slope"), [(0.0, 0.0), (0.002, 2.0)])
def test_the_slope_is_that_behind_the_warm_up(per_request, slope):
    seen = [(num, 400 + min(num, 3000) * 0.01 + per_request * num) for num in range(0, 20_001, 200)]
    assert slope_mib(seen) == pytest.approx(slope, abs=1e-9)


def test_a_server_is_looked_at_after_every_part(served, capsys):
    url, pid = served
    args = ["--num-requests", "100", "--max-prompt-tokens", "100", "--concurrency", "2", "--max-growth-mib", "1000"]
    assert main(["flat", "--base-url", url, "--pid", str(pid), *args]) == 0
    report = last_json(capsys)[1]
    assert (report["requests"], report["failures"], len(report["rss_mib"])) == (100, 0, 11)


@pytest.mark.parametrize(
    "args", [["--pid", "999999999"], ["--pid", "1", "--num-requests", "5"], ["--pid", "1", "--concurrency", "0"]]
)
def test_it_refuses_before_it_sends_anything(args, capsys):
    assert main(["flat", *args]) == 2
    assert "bench flat: " in capsys.readouterr().err
