"""AttentionMeta: maps the tokens of a step to sequences, and the sequences' context to KV cache blocks.

It is built once per step and used by every layer. It contains no tensor of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Rows of a step by batch index, with T tokens in total. Empty rows at the end are padding.

    - query_start_loc [R + 1] int32, from 0 to T, non-decreasing: row r has tokens query_start_loc[r] to query_start_loc[r + 1]
    - seq_lens [R] int32: tokens in context, including this step's; query i of row r is at position seq_lens[r] - query_len[r] + i
    - block_tables [*, max_blocks] int32: entry b of a table is the block with positions b * block_size and on
    - rows [R] int32: row r uses table rows[r], below 0 for padding; None: table r
    - max_query_len, max_seq_len: upper bounds
    - prefix_lens [R] int32: tokens of each row that attend to each other under a "prefix_full" mask; None if no layer has one
    - spans: (first token, end, seq_len) of each row, for planning on the host; None in a captured graph, whose rows change
    - uniform: every row has one query, and earlier steps have written all of its context except that token"""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    rows: Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] | None = None
    uniform: bool = False
    prefix_lens: Tensor | None = None


# Attention within chunks of a context (Llama 4, Meta 2025): a query attends to keys of its own chunk only. Kernels do
# not support chunks: the part of a request in one chunk becomes a separate request, whose context starts with the
# chunk. This is computed on the device, so a captured graph can contain it.
def max_pieces(num_tokens: int, num_rows: int, chunk: int) -> int:
    """Return the maximum number of pieces into which `in_chunks` can divide `num_rows` rows with `num_tokens` queries in total."""
    return num_rows + min(num_rows, num_tokens // 2) + num_tokens // chunk


def in_chunks(
    metas: Sequence[AttentionMeta], positions: Tensor, chunk: int, block_size: int, num_pieces: int
) -> list[AttentionMeta]:
    """Divide rows into `num_pieces` pieces, rows that each attend within one chunk. The last pieces may be empty. Rows of one query
    keep their index.

    `metas`: equal except for their block tables. positions [T] int64: positions of the tokens; entries after the last row are
    ignored. `chunk`: size of a chunk in tokens, a multiple of `block_size`, the tokens of a block."""
    meta = metas[0]
    if meta.max_query_len == 1:
        query_start_loc, last = meta.query_start_loc, meta.seq_lens - 1
        requests = torch.arange(len(last), device=last.device)
        is_piece = torch.ones_like(requests, dtype=torch.bool) if meta.rows is None else meta.rows >= 0
        first = last
    else:
        query_start_loc, request_of_token = _cut(meta, positions, chunk, num_pieces)
        first_token = query_start_loc[:-1].clamp(max=len(positions) - 1)
        requests, first = request_of_token[first_token], positions[first_token]
        last = positions[(query_start_loc[1:] - 1).clamp(min=0)]
        is_piece = query_start_loc[1:] > query_start_loc[:-1]
    begin = torch.where(is_piece, first // chunk * chunk, 0)
    max_seq_len = min(chunk, meta.max_seq_len)
    entries = begin[:, None] // block_size + torch.arange(-(-max_seq_len // block_size), device=begin.device)
    entries = entries.clamp(max=meta.block_tables.shape[1] - 1)
    tables = (requests if meta.rows is None else meta.rows[requests].clamp(min=0))[:, None]
    numbers = torch.arange(len(begin), device=begin.device)
    piece = replace(
        meta,
        query_start_loc=query_start_loc,
        seq_lens=torch.where(is_piece, last + 1 - begin, 0).int(),
        max_seq_len=max_seq_len,
        rows=None if meta.rows is None else torch.where(is_piece, numbers, -1).int(),
        spans=None,  # only the device has the boundaries of chunks within a request
        uniform=False,
    )
    return [replace(piece, block_tables=each.block_tables[tables, entries]) for each in metas]


def _cut(meta: AttentionMeta, positions: Tensor, chunk: int, num_pieces: int) -> tuple[Tensor, Tensor]:
    """Return the boundaries of the pieces [num_pieces + 1] int32, and the row of each token [T]. While kernels are compiled,
    positions are uninitialised and may make more pieces than `num_pieces`; the excess is ignored."""
    starts, tokens = meta.query_start_loc, torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    end = starts[-1]
    request_of_token = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=len(starts) - 2)
    begins = ((tokens == starts[request_of_token]) | (positions % chunk == 0)) & (tokens < end)
    nowhere = num_pieces + 1
    places = torch.where(begins, begins.cumsum(0) - 1, nowhere).clamp(max=nowhere)
    return end.repeat(nowhere + 1).scatter(0, places, tokens)[:-1], request_of_token


def across(meta: AttentionMeta, num_tokens: int, num_keys: int) -> AttentionMeta:
    """Return metadata for cross-attention by causal kernels. Each of the T = `num_tokens` queries becomes a row that attends to all
    `num_keys` keys of its row's block table. The host reads no tensor."""
    if meta.max_query_len == 1:
        lens = torch.full_like(meta.seq_lens, num_keys)
        if meta.rows is not None:
            lens = torch.where(meta.rows >= 0, lens, 0)
        return replace(meta, seq_lens=lens, max_seq_len=num_keys, spans=None, uniform=False)
    starts = meta.query_start_loc
    tokens = torch.arange(num_tokens + 1, dtype=torch.int32, device=starts.device)
    request = (torch.searchsorted(starts, tokens[:-1], right=True) - 1).clamp(max=len(starts) - 2)
    is_query = tokens[:-1] < starts[-1]
    return replace(
        meta,
        query_start_loc=tokens.minimum(starts[-1]),
        seq_lens=torch.where(is_query, num_keys, 0).int(),
        block_tables=meta.block_tables[request] if meta.rows is None else meta.block_tables,
        rows=None if meta.rows is None else torch.where(is_query, meta.rows[request], -1).int(),
        max_query_len=1,
        max_seq_len=num_keys,
        spans=None,
        uniform=False,
    )


_times: ContextVar[float] = ContextVar("times", default=1.0)


@contextmanager
def caches_stand_for(times: float) -> Iterator[None]:
    """Context manager in which kernels are chosen, on this thread, as if KV caches were `times` as large."""
    before = _times.set(times)
    try:
        yield
    finally:
        _times.reset(before)


def num_elements(cache: Tensor) -> float:
    """Return the number of elements of `cache`, multiplied by the factor of `caches_stand_for`."""
    return cache.numel() * _times.get()
