"""Drafts: draft tokens of a row, computed in one step and verified against the sampler's draws.

A draw depends on (seed, position), the logits and earlier draws. Penalties count accepted drafts as drawn tokens. So a row
that accepts drafts while they equal the draws has exactly the tokens of one-by-one decoding. `ops.sample` does this on the
device, and `accepted_ids` on the host. A row with matchers has a mask for each draw, made as if the earlier drafts had been
drawn (`constrain/mask_maker.py`). It is sampled up to its last mask: a draft that is not allowed, or one that ends the
grammar."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import Sample, ScheduledRow


def num_drafts(row: ScheduledRow) -> int:
    return row.work.num_drafts if isinstance(row.work, Sample) else 0


def accepted_ids(drawn: Sequence[int], draft_ids: Sequence[int]) -> list[int]:
    """Return the token ids that a row gains: the accepted drafts and the draw after them. `drawn` has one id more than
    `draft_ids`."""
    for count, (token_id, guess) in enumerate(zip(drawn, draft_ids, strict=False)):
        if token_id != guess:
            return [*drawn[: count + 1]]
    return [*drawn]


def check_drafts(rows: Sequence[ScheduledRow]) -> None:
    """Raises ValueError for drafts that cannot be checked, but for those of a stage that hands on, which another one checks."""
    for row in rows:
        if row.guessed_on_device and row.work is None and len(row.draft_ids) < row.num_tokens:
            continue
        if row.draft_ids and (num_drafts(row) != len(row.draft_ids) or len(row.draft_ids) >= row.num_tokens):
            raise ValueError(
                f"row {row.row} has {len(row.draft_ids)} drafts among {row.num_tokens} tokens, and its work says {row.work}"
            )
