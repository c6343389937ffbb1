"""Sampling by oneloop_native for rows that take the largest logit; the reference computes all others."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.native import module as native
from ops.sampling import reference
from ops.sampling.tables import FLAGS, Drafts, Masks, SamplingTables

assert FLAGS == 0  # the word that the native function reads


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables,
    drafts: Drafts | None = None, masks: Masks | None = None,
) -> Tensor:  # fmt: skip
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    special = native.sample_largest(logits, sample_rows, tables.records, last_ids, ids)
    if special:
        rows = slice(None) if len(special) == len(ids) else special
        guesses = None if drafts is None else drafts.ids[rows]
        limits = None if masks is None else masks._replace(rows=masks.rows[rows])
        ids[rows] = drawn = reference.draw(
            logits[rows], sample_rows[rows], sample_positions[rows], tables, guesses, limits
        )
        if drafts is None:
            reference.note(drawn, sample_rows[rows], last_ids)
    if drafts is not None:
        reference.accept(ids, sample_rows, last_ids, drafts)
    return ids
