"""Steps of a warm-up: what they are made of."""

from __future__ import annotations

import pytest

from runtime.runner.warmup import with_a_short_one


@pytest.mark.parametrize(
    ("lengths", "max_num_seqs", "found"),
    [
        ([8192], 256, [8190, 2]),
        ([254, 254, 254], 256, [252, 254, 254, 2]),
        ([254, 254, 254], 3, [252, 254, 2]),
        ([254, 254], 1, []),
        ([3], 8, []),
    ],
)
def test_a_short_prompt_stands_beside_long_ones_within_their_budget(lengths, max_num_seqs, found):
    assert with_a_short_one(lengths, max_num_seqs) == found
    assert sum(found) <= sum(lengths)
    assert len(found) <= max_num_seqs
