"""One token id out of a row of logits, as the tables of what each row wants say."""

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
    """One id per row of logits [L, V], [L] int64, as `tables` ask for row sample_rows[l] (int32; -1: none) at index
    sample_positions[l] (int64); -1 where a row's logits are unusable. Writes last_ids[row] and the rows' counts. Without
    `drafts` no row comes twice; `masks` stand for the tables' own."""
    run = _sample.runs[logits.device, logits.dtype]
    return run(logits, sample_rows, sample_positions, last_ids, tables, drafts, masks)
