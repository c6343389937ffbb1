"""Drafts: guesses of a row's next tokens, computed in one step and checked against what the sampler draws at each.

A draw depends on (seed, position), on logits and on what was drawn before, which is right where the guesses before are: penalties
count these as if they had been drawn. So a row that accepts its guesses as long as they equal the draws has exactly the
tokens that it would have had one by one. `ops.sample` does so on the device, and `accepted_ids` says the same on the host. A row
with matchers brings a mask for each of its draws, made as if the guesses before had been drawn (`constrain/mask_maker.py`), and is
sampled no further than its masks go: up to a guess that is not allowed, or behind which nothing may follow."""

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
