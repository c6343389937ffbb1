"""Verification of draft tokens: a row's draft tokens are computed in one step and compared with its sampled tokens.

A sample depends only on (seed, position), the logits and earlier samples. Penalties count accepted draft tokens like sampled ones.
A row that accepts draft tokens as long as they equal its samples therefore has exactly the tokens of decoding one by one.
`ops.sample` verifies on the device, and `accepted_ids` on the host. A row with a grammar has a mask for each sample, computed as if
the earlier draft tokens had been sampled (`constrain/mask_maker.py`). Its last mask is that of the first draft token that is not
allowed, or that ends the grammar. Later samples are ignored."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import Sample, ScheduledRow


def num_drafts(row: ScheduledRow) -> int:
    return row.work.num_drafts if isinstance(row.work, Sample) else 0


def accepted_ids(drawn: Sequence[int], draft_ids: Sequence[int]) -> list[int]:
    """Return the new token ids of a row: the accepted draft tokens, and the sample after them. `drawn`: samples at the positions of
    the draft tokens, and one more."""
    for count, (token_id, guess) in enumerate(zip(drawn, draft_ids, strict=False)):
        if token_id != guess:
            return [*drawn[: count + 1]]
    return [*drawn]


def check_drafts(rows: Sequence[ScheduledRow]) -> None:
    """Raise ValueError if a row has draft tokens that this step cannot verify. Pipeline stages before the last one verify none."""
    for row in rows:
        if row.guessed_on_device and row.work is None and len(row.draft_ids) < row.num_tokens:
            continue
        if row.draft_ids and (num_drafts(row) != len(row.draft_ids) or len(row.draft_ids) >= row.num_tokens):
            raise ValueError(
                f"row {row.row} has {len(row.draft_ids)} drafts among {row.num_tokens} tokens, and its work says {row.work}"
            )
