"""StepTensors: the fixed addresses of a step's inputs, and the tables by row that outlive it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The model's and the sampler's inputs, for up to T tokens of up to B rows, and the tables by row, R, that outlive a step.

    input_ids, positions [T] int64. slot_mapping [G, T] int64, for G block tables of each row: of each token, or, in the
    last `num_state_tables`, of each batch index. By batch index: rows, seq_lens, sample_rows [B] int32; query_start_loc [B + 1]
    int32; sample_positions, logit_tokens [B] int64, the latter each row's last token of the step. By row: last_ids
    [R + R * D + 1] int64, what it sampled last, and behind these, D for each row, what is guessed to follow; num_computed [R]
    int32, its tokens in the KV cache behind the steps so far; block_tables [G, R, E] int32, whose entries are about `block_size`
    tokens each."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    rows: Tensor
    seq_lens: Tensor
    sample_rows: Tensor
    query_start_loc: Tensor
    sample_positions: Tensor
    logit_tokens: Tensor
    last_ids: Tensor
    num_computed: Tensor
    block_tables: Tensor
    num_state_tables: int
    block_size: int


class Behind(NamedTuple):
    """A token more for each of B rows, tensors of its own. positions [B] int64; slot_mapping [G, B] int64; rows, seq_lens [B]
    int32; query_start_loc [B + 1] int32."""

    positions: Tensor
    slot_mapping: Tensor
    rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
