"""What the feed of dashboard and inspector costs beside 256 streams, in functions called: tests/benches/feed.py has it in time."""

from __future__ import annotations

from tests.benches.feed import STEPS_PER_S, calls, costs

SHARE = 10  # of a second's steps are taken, which all call the same


async def test_a_snapshot_a_second_costs_less_than_a_hundredth_of_256_streams():
    (cost,) = await costs(calls, 1, steps_per_s=STEPS_PER_S // SHARE)
    assert cost.num_bytes > 256 * 50, "all of them are told"
    assert cost.snapshot < SHARE * cost.steps / 100
