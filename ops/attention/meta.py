"""AttentionMeta: which tokens of a step belong to which sequence, and where their context lies in the paged cache.

Built once per step and shared by every layer. It knows no tensor of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Rows of a step, T tokens in all. Row r holds tokens query_starts[r] to query_starts[r + 1].

    query_starts [R + 1] int32, from 0 to T, never falling. context_lens [R] int32: tokens in context including this
    step's. block_tables [R, max_blocks] int32: entry b holds positions b * block_size and on. Query i of row r stands
    at position context_lens[r] - query_len[r] + i. `max_query_len` and `max_context_len` are upper bounds."""

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int
