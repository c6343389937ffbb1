"""AttentionMeta: which tokens of a step belong to which sequence, and where their context lies in the paged cache.

Built once per step and shared by every layer. It knows no tensor of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """The requests of a step by batch index, T tokens in all; at the end there may be empty ones, for padding.

    query_start_loc [R + 1] int32, from 0 to T, never falling: request r has tokens query_start_loc[r] to query_start_loc[r + 1].
    seq_lens [R] int32: tokens in context including this step's. block_tables [*, max_blocks] int32: entry b of a request's table
    holds positions b * block_size and on; request r reads table `rows[r]` (rows [R] int32, below 0 for padding), or table r where
    `rows` is None. Query i of request r stands at position seq_lens[r] - query_len[r] + i. `max_query_len` and `max_seq_len`
    are upper bounds.

    `prefix_lens` [R] int32: tokens of each row that a "prefix_full" mask lets see each other, None where no layer has one.

    `spans`: (first token, the one behind the last, seq_len) of each request, for those who plan on the host; None in a captured
    graph, whose requests change. `uniform`: every request has one query, and all of its context but that token was written by
    earlier steps."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    rows: Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] | None = None
    uniform: bool = False
    prefix_lens: Tensor | None = None
