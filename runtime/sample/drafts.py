"""Drafts: guesses of a row's next tokens, computed in one step and checked against what the sampler draws at each.

A draw depends on (seed, position) and logits alone, so a row that accepts its guesses as long as they equal the draws has exactly
the tokens that it would have had one by one. That does not go for rows whose logits depend on the tokens before in other ways:
penalties count what was drawn, a matcher's mask depends on it. Such rows take no drafts: see `SamplingParams.takes_drafts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from runtime.batch import RowBinding, Sample, ScheduledRow
from runtime.kv.layout import KVLayout
from runtime.transfer import index_on

_NO_ID = -2  # pads guesses: no draw is that, not even an unusable one


def num_drafts(row: ScheduledRow) -> int:
    return row.work.num_drafts if isinstance(row.work, Sample) else 0


def accepted_ids(drawn: Sequence[int], draft_ids: Sequence[int]) -> list[int]:
    """What a row gains of `drawn`, one more than its guesses: accepted ones and the draw behind them."""
    for count, (token_id, guess) in enumerate(zip(drawn, draft_ids, strict=False)):
        if token_id != guess:
            return [*drawn[: count + 1]]
    return [*drawn]


class DraftRules:
    """Which rows take drafts, and that no other gets some. `layer_refusal`: why no row of this model does."""

    def __init__(self, layer_refusal: str | None = None) -> None:
        self._layer_refusal = layer_refusal
        self._refusals: dict[int, str] = {}

    @classmethod
    def of(cls, layout: KVLayout) -> DraftRules:
        """The check for a model whose layers keep what `layout` holds: a recurrent state cannot go back behind a wrong guess."""
        return cls("its recurrent layers cannot take one back" if layout.num_state_tables else None)

    def bind(self, row: int, binding: RowBinding) -> None:
        self._refusals.pop(row, None)
        if binding.masked:
            self._refusals[row] = "what it may draw depends on what it drew"
        elif not binding.params.takes_drafts:
            self._refusals[row] = "its penalties count what it drew"

    def check(self, rows: Sequence[ScheduledRow]) -> None:
        """Raises ValueError for drafts that cannot be checked."""
        for row in rows:
            if not row.draft_ids:
                continue
            if num_drafts(row) != len(row.draft_ids) or len(row.draft_ids) >= row.num_tokens:
                raise ValueError(
                    f"row {row.row} has {len(row.draft_ids)} drafts among {row.num_tokens} tokens, and its work says {row.work}"
                )
            refusal = self._layer_refusal or self._refusals.get(row.row)
            if refusal is not None:
                raise ValueError(f"row {row.row} takes no drafts: {refusal}")


@dataclass(frozen=True, slots=True)
class DraftCheck:
    """Drafts of D rows that sample, with up to K guesses each: rows [D] int64; ids [D, K] int64, padded with _NO_ID; counts [D]
    int64; logits_rows [D, K + 1] int64: which of the step's logits rows each id is checked by, the last repeated as padding."""

    rows: Tensor
    ids: Tensor
    counts: Tensor
    logits_rows: Tensor

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], device: torch.device) -> DraftCheck:
        """`rows`: all that sample in the step, in the order of the logits."""
        firsts = accumulate((1 + num_drafts(row) for row in rows), initial=0)
        drafted = [(row, first) for row, first in zip(rows, firsts, strict=False) if row.draft_ids]
        most = max(len(row.draft_ids) for row, _ in drafted)
        return cls(
            index_on(device, [row.row for row, _ in drafted]),
            index_on(device, [[*row.draft_ids, *[_NO_ID] * (most - len(row.draft_ids))] for row, _ in drafted]),
            index_on(device, [len(row.draft_ids) for row, _ in drafted]),
            index_on(device, [[first + min(i, len(row.draft_ids)) for i in range(most + 1)] for row, first in drafted]),
        )

    def settle(self, sampled: Tensor, last_ids: Tensor, num_computed: Tensor) -> None:
        """sampled [S] int64, one id a logits row. Leaves in the tables by row what was sampled last, and takes off the guesses
        that were computed for nothing."""
        drawn = sampled[self.logits_rows]
        accepted = (drawn[:, :-1] == self.ids).long().cumprod(1).sum(1)
        last_ids[self.rows] = drawn.gather(1, accepted[:, None])[:, 0].clamp(min=0)  # NOT_FINITE is no input
        num_computed[self.rows] -= (self.counts - accepted).to(num_computed.dtype)
