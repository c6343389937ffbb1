"""AttentionMeta: maps the tokens of a step to sequences, and the sequences' context to KV cache blocks.

Built once per step and shared by every layer. It contains no tensor of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Requests of a step by batch index, T tokens in total; empty requests at the end are padding.

    query_start_loc [R + 1] int32, from 0 to T, non-decreasing: request r has tokens query_start_loc[r] to query_start_loc[r +
    1]. seq_lens [R] int32: tokens in context including this step's. block_tables [*, max_blocks] int32: entry b of a request's
    table holds positions b * block_size and on; request r reads table `rows[r]` (rows [R] int32, below 0 for padding), or table
    r if `rows` is None. Query i of request r is at position seq_lens[r] - query_len[r] + i. `max_query_len` and `max_seq_len`
    are upper bounds.

    `prefix_lens` [R] int32: tokens of each row that attend to each other under a "prefix_full" mask, None if no layer has one.

    `spans`: (first token, end, seq_len) of each request, for planning on the host; None in a captured graph, whose requests
    change. `uniform`: every request has one query, and earlier steps have written all of its context except that token."""

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
    """Return the largest number of pieces into which `in_chunks` can cut `num_rows` requests of `num_tokens` queries in all."""
    return num_rows + min(num_rows, num_tokens // 2) + num_tokens // chunk


def in_chunks(
    metas: Sequence[AttentionMeta], positions: Tensor, chunk: int, block_size: int, num_pieces: int
) -> list[AttentionMeta]:
    """Cut requests into `num_pieces` requests that each attend within one chunk; the last pieces may be empty. Requests of one
    query keep their number.

    `metas`: equal but for their block tables. positions [T] int64: positions of the tokens; entries after the last request
    are ignored. `chunk`: tokens, a multiple of `block_size`, the tokens of a block table's entry."""
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
    """Return the boundaries of the pieces [num_pieces + 1] int32 and the request of each token [T]. If positions make more
    pieces than `num_pieces` (uninitialised positions while kernels are compiled), the excess pieces are empty."""
    starts, tokens = meta.query_start_loc, torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    end = starts[-1]
    request_of_token = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=len(starts) - 2)
    begins = ((tokens == starts[request_of_token]) | (positions % chunk == 0)) & (tokens < end)
    nowhere = num_pieces + 1
    places = torch.where(begins, begins.cumsum(0) - 1, nowhere).clamp(max=nowhere)
    return end.repeat(nowhere + 1).scatter(0, places, tokens)[:-1], request_of_token


def across(meta: AttentionMeta, num_tokens: int, num_keys: int) -> AttentionMeta:
    """Return metadata for cross-attention by causal kernels: each of the T = `num_tokens` queries becomes a request of its
    own that attends to all `num_keys` keys of its request's block table. The host reads no tensor."""
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
    """Choose kernels on this thread as if KV caches were `times` as large."""
    before = _times.set(times)
    try:
        yield
    finally:
        _times.reset(before)


def num_elements(cache: Tensor) -> float:
    """Return the number of elements of the larger cache that `cache` represents inside `caches_stand_for`."""
    return cache.numel() * _times.get()
