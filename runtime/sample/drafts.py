"""Drafts: guesses of a row's next tokens, computed in one step and checked against what the sampler draws at each.

A draw depends on (seed, position), on logits and on what was drawn before, which is right where the guesses before are: penalties
count these as if they had been drawn. So a row that accepts its guesses as long as they equal the draws has exactly the
tokens that it would have had one by one. `ops.sample` does so on the device, and `accepted_ids` says the same on the host. Not
yet for rows with matchers, whose masks depend on what was drawn: they take no drafts, see `SamplingParams.takes_drafts`."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import RowBinding, Sample, ScheduledRow
from runtime.kv.layout import KVLayout


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
