"""Captured steps: which steps a graph may serve."""

from __future__ import annotations

import pytest

from runtime.api import PoolingParams
from runtime.batch import SAMPLE, Pool, PromptLogprobsSpan, Sample, ScheduledRow
from runtime.platform.captured_steps import serves
from tests.pooling import LAST

DECODE = ScheduledRow(0, 0, 5, 1, (), work=SAMPLE)
PIECE = ScheduledRow(1, 1, 64, 32, (7,) * 32)
FRESH = ScheduledRow(2, 2, 0, 99, (7,) * 99, work=SAMPLE)


@pytest.mark.parametrize(
    ("row", "served"),
    [
        (DECODE, True),
        (PIECE, True),
        (FRESH, True),
        (FRESH._replace(num_tokens=8000, token_ids=(7,) * 8000), True),
        (DECODE._replace(num_tokens=3, draft_ids=(4, 5), work=Sample(num_drafts=2)), True),
        (PIECE._replace(work=LAST), True),
        (DECODE._replace(work=LAST), True),
        (PIECE._replace(work=Pool(PoolingParams(token_type_ids=(0,) * 96))), False),
        (FRESH._replace(prompt_logprobs=PromptLogprobsSpan(1, (7,) * 98, 0)), False),
    ],
)
def test_a_graph_serves_rows_that_want_no_more_than_draws_and_vectors(row, served):
    assert serves((DECODE, row)) is served
