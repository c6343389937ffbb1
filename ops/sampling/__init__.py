"""Sampling of one token id per row of logits, by per-row parameters in tables."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops import native as cpu
from ops.registry import USUAL, Op
from ops.sampling import native, reference
from ops.sampling.tables import Drafts, Masks, SamplingTables

_sample = Op(
    "sample",
    USUAL,
    [
        backends.native("sample", native.sample, cpu.supports),
        backends.triton("sample", "ops.sampling.triton_sample:sample"),
        backends.reference("sample", reference.sample),
    ],
)


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables,
    drafts: Drafts | None = None, masks: Masks | None = None,
) -> Tensor:  # fmt: skip
    """Sample one id per row of logits [L, V], as [L] int64. `tables` has the parameters of row sample_rows[l] (int32; -1:
    none); sample_positions[l] (int64) is the token's index. Unusable logits yield -1. Writes last_ids[row] and the rows'
    counts. Rows are distinct unless there are `drafts`; `masks` replace the tables' masks."""
    run = _sample.runs[logits.device, logits.dtype]
    return run(logits, sample_rows, sample_positions, last_ids, tables, drafts, masks)
