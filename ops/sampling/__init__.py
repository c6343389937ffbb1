"""Sampling of one token id for each row of logits, with parameters of each row in tables."""

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
    """Sample a token id for each row of logits [L, V], as [L] int64; -1 for unusable logits. sample_rows [L] int32: row whose
    parameters in `tables` are used, -1 for none. sample_positions [L] int64: index of the sampled token in its sequence. Writes
    last_ids[row] and the rows' token counts. Rows are distinct unless there are `drafts`. `masks` replace the masks in `tables`."""
    run = _sample.runs[logits.device, logits.dtype]
    return run(logits, sample_rows, sample_positions, last_ids, tables, drafts, masks)
