"""Sampling by oneloop_native where a row wishes for nothing but its largest logit; the reference serves all others."""

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
    wishing = native.sample_largest(logits, sample_rows, tables.records, last_ids, ids)
    if wishing:
        lines = slice(None) if len(wishing) == len(ids) else wishing
        ids[lines] = reference.sample(logits[lines], sample_rows[lines], sample_positions[lines], last_ids, tables)
    return ids
