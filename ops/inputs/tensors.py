"""StepTensors: the fixed addresses of a step's inputs, and the tables by row that outlive it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The model's and the sampler's inputs, for up to T tokens and L lines, and the tables by row R that outlive a step.

    ids, positions [T] int64; slots [G, T] int64, for G block tables of each row, of tokens or lines. rows, context_lens,
    sample_rows [L] int32; query_starts [L + 1] int32; sample_positions, last_tokens [L] int64, the latter each line's last
    token. last_ids [R] int64, block_tables [G, R, B] int32."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    context_lens: Tensor
    sample_rows: Tensor
    query_starts: Tensor
    sample_positions: Tensor
    last_tokens: Tensor
    last_ids: Tensor
    block_tables: Tensor
