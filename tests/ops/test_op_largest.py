"""Native sampling: the largest logit as the reference finds it, and the reference itself where a row needs more."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.sampling import reference
from tests.ops.sampling_case import RowParams, fill

INF = float("inf")


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 1023, 1024, 1040, 3001])
def test_ids_are_those_of_the_reference(isa: str, vocab_size: int) -> None:
    greedy = RowParams(temperature=0)
    params_by_row = [greedy, RowParams(seed=3), greedy, RowParams(temperature=0, bias={0: 5.0}), RowParams(top_k=2)]
    rows = torch.tensor([2, 0, -1, 1, 4, 3, 0, 2, 0, 2, 0, 2], dtype=torch.int32)
    logits = torch.randn(len(rows), vocab_size)
    logits[1] = logits[1].round()  # equals: the first of them
    logits[6, -1] = torch.nan
    logits[7, vocab_size // 2] = INF
    logits[8] = -INF
    logits[9, 1:] = -INF
    logits[10, 0] = torch.nan
    positions = torch.arange(len(rows))
    tables, last = fill(params_by_row, vocab_size), torch.full((len(params_by_row),), 77)
    expected_tables, expected_last = fill(params_by_row, vocab_size), last.clone()
    expected = reference.sample(logits.clone(), rows, positions, expected_last, expected_tables)
    ids = ops.sample(logits, rows, positions, last, tables)
    assert ids[rows >= 0].tolist() == expected[rows >= 0].tolist()
    assert last.tolist() == expected_last.tolist()
    assert torch.equal(tables.counts, expected_tables.counts)


def test_rows_outside_the_tables_are_refused() -> None:
    pytest.importorskip("oneloop_native")
    with pytest.raises(ValueError, match="outside"):
        ops.sample(
            torch.zeros(1, 8), torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64), fill([RowParams()], 8),
        )  # fmt: skip
