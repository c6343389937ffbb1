"""Pooling: the vectors that rows whose work is `Pool` ask for, as float32.

"last" is the final norm's output at the row's last token of the step, which a causal model has made of all tokens before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from runtime.batch import Pool, ScheduledRow
from runtime.transfer import index_on, to_host

KINDS = ("last",)


@dataclass(frozen=True, slots=True)
class Pooled:
    """vectors [P, H] float32, one for each of `rows` [P]."""

    rows: tuple[int, ...]
    vectors: Tensor

    @classmethod
    def compute(
        cls, rows: Sequence[ScheduledRow], device: torch.device, final_hidden: Callable[[Tensor], Tensor]
    ) -> Pooled | None:
        """`rows` in the order of the step's tokens; `final_hidden` of token indices [P] int64 gives [P, H].

        None where nobody asks. Raises ValueError for a kind that it does not know."""
        pooling = [index for index, row in enumerate(rows) if type(row.work) is Pool]
        if not pooling:
            return None
        for index in pooling:
            _check(rows[index])
        stops = list(accumulate(row.num_tokens for row in rows))
        numbers, tokens = tuple(rows[index].row for index in pooling), [stops[index] - 1 for index in pooling]
        return cls(numbers, final_hidden(index_on(device, tokens)).float())

    def to_host(self) -> Pooled:
        return Pooled(self.rows, to_host(self.vectors))

    def by_row(self) -> dict[int, list[float] | None]:
        """None where a vector is not finite. Reads the tensor, so it must be there."""
        finite = self.vectors.isfinite().all(dim=1).tolist()
        return {
            row: vector if fine else None
            for row, vector, fine in zip(self.rows, self.vectors.tolist(), finite, strict=True)
        }


def _check(row: ScheduledRow) -> None:
    assert isinstance(row.work, Pool)
    if row.work.kind not in KINDS:
        raise ValueError(f"pooling {row.work.kind!r} is not known; there is {', '.join(KINDS)}")
