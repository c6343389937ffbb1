"""AttentionMeta: which tokens of a step belong to which sequence, and where their context lies in the paged cache.

Built once per step and shared by every layer. It knows no tensor of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Lines of a step, T tokens in all. Line r holds tokens query_starts[r] to query_starts[r + 1]; at the end it may be padded
    with empty lines.

    query_starts [R + 1] int32, from 0 to T, never falling. context_lens [R] int32: tokens in context including this
    step's. block_tables [*, max_blocks] int32: entry b of a line's table holds positions b * block_size and on; line r reads
    table `rows[r]` (rows [R] int32, below 0 for padding), or table r where `rows` is None. Query i of line r stands at position
    context_lens[r] - query_len[r] + i. `max_query_len` and `max_context_len` are upper bounds.

    `prefix_lens` [R] int32: tokens of each row that a "prefix_full" mask lets see each other, None where no layer has one.

    `spans`: (start, end, context length) of each line, for those who plan on the host; None in a captured graph, whose
    lines change. `uniform`: every line has one query, and all of its context but that token was written by earlier steps."""

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int
    rows: Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] | None = None
    uniform: bool = False
    prefix_lens: Tensor | None = None
