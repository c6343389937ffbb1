"""Sampling by oneloop_native where a row asks for nothing but its largest logit; the reference serves all others."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.native import module as native
from ops.sampling import reference
from ops.sampling.tables import FLAGS, SamplingTables

assert FLAGS == 0  # the word that the native function looks at


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables
) -> Tensor:
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    special = native.sample_largest(logits, sample_rows, tables.records, last_ids, ids)
    if special:
        rows = slice(None) if len(special) == len(ids) else special
        ids[rows] = reference.sample(logits[rows], sample_rows[rows], sample_positions[rows], last_ids, tables)
    return ids
