"""Attention in plain torch, over the paged cache or within a step: softmax(q k^T) v, row by row, under any mask.

Supports any float dtype, any device, and int8 caches. Computes in float32, or in float64 for float64 queries. The host reads the
row lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.heads import CAUSAL, FULL, PREFIX_FULL, AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.kv.eight_bits import from_int8_entries

QUERY_CHUNK = 256  # queries per score matrix, to limit the memory for long prompts


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None, mask: str = CAUSAL,
) -> Tensor:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lens, prefixes = meta.query_start_loc.tolist(), meta.seq_lens.tolist(), _prefixes(meta, mask)
    for row, context_len in enumerate(lens):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        table = meta.block_tables[row if meta.rows is None else max(int(meta.rows[row]), 0)]
        keys, values = (gather(cache, table, context_len) for cache in (k_cache, v_cache))
        out[start:end] = _attend_row(
            q[start:end], keys, values, scale, window, softcap, sinks, alibi, mask, prefixes[row]
        )
    return out


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMeta, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None, alibi: Tensor | None, mask: str, relative_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention [T, Hq, D] within each row, for q [T, Hq, D], k and v [T, Hkv, D]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, prefixes = meta.query_start_loc.tolist(), _prefixes(meta, mask)
    for start, end, prefix in zip(starts, starts[1:], prefixes, strict=False):
        if start < end:
            keys, values = (each[start:end].transpose(0, 1) for each in (k, v))
            out[start:end] = _attend_row(
                q[start:end], keys, values, scale, window, softcap, sinks, alibi, mask, prefix, relative_bias
            )
    return out


def _prefixes(meta: AttentionMeta, mask: str) -> list[int]:
    """Return the number of prefix tokens of each row, which attend to each other. Raises ValueError if the mask requires
    `prefix_lens` and `meta` has none."""
    if mask != PREFIX_FULL:
        return [0] * (len(meta.query_start_loc) - 1)
    if meta.prefix_lens is None:
        raise ValueError("a prefix_full mask needs AttentionMeta.prefix_lens")
    lens: list[int] = meta.prefix_lens.tolist()
    return lens


def _attend_row(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None, alibi: Tensor | None, mask: str, prefix_len: int, relative_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention [n, Hq, D] of one row. q [n, Hq, D] are its last n tokens; keys and values [Hkv, context, D]. Raises
    ValueError if the mask lets these queries attend to keys of a later step, or queries of an earlier step attend to these keys."""
    num_queries, context_len = len(q), keys.shape[1]
    begin = context_len - num_queries
    late = begin if mask == FULL else begin < prefix_len and (begin or context_len < prefix_len)
    if late:
        raise ValueError(f"what a {mask} mask shows must be computed in one step")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for first in range(begin, context_len, QUERY_CHUNK):  # positions; the chunk's first query has the earliest key
        stop = min(first + QUERY_CHUNK, context_len)
        low = 0 if window is None else max(0, first + 1 - window)
        positions = torch.arange(first, stop, device=q.device)[:, None]
        key_positions = torch.arange(low, context_len, device=q.device)
        hidden = key_positions > positions
        if mask == FULL:
            hidden = torch.zeros_like(hidden)
        elif prefix_len:
            hidden &= (positions >= prefix_len) | (key_positions >= prefix_len)
        if window is not None:
            hidden |= key_positions <= positions - window
            if mask == FULL:
                hidden |= key_positions >= positions + window
        bias = None
        if alibi is not None:
            bias = -alibi.to(torch.promote_types(q.dtype, torch.float32))[:, None, None] * (positions - key_positions)
        if relative_bias is not None:
            bias = relative_bias[:, key_positions - positions + relative_bias.shape[1] // 2]
        chunk = q[first - begin : stop - begin]
        out[first - begin : stop - begin] = attend_hidden(
            chunk, keys[:, low:], values[:, low:], hidden, scale, softcap, sinks, bias
        )
    return out


def gather(cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """Return one row's context from the cache, [heads, context_len, D], in the cache's dtype; int8 becomes float32."""
    block_size = cache.shape[2]
    blocks = cache[table[: -(-context_len // block_size)].long()]
    context = blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]
    return from_int8_entries(context) if cache.dtype == torch.int8 else context


def attend_hidden(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None, sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention [n, Hq, D] of q [n, Hq, D] over keys and values [Hkv, context, D]. hidden [n, context] bool: keys that a
    query does not attend to. bias [Hq, n, context] is added to the scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_queries, num_heads, head_size = q.shape
    groups = q.to(wide).transpose(0, 1).reshape(keys.shape[0], -1, head_size)  # query heads of a kv head are adjacent
    scores = (groups @ keys.to(wide).transpose(1, 2) * scale).view(num_heads, num_queries, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores += bias
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, num_queries, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    mixed = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values.to(wide)
    return mixed.view(num_heads, num_queries, head_size).transpose(0, 1).to(q.dtype)


# Attention in which blocks of a step's tokens attend to each other completely, as of an image (Gemma 3, 2025): first
# causal attention by any kernel, then each block is recomputed. Keys and values must be stored.
class TokenBlock(NamedTuple):
    """Tokens [start, stop) of a step that attend to each other. `table`: index of their row's block table. `position`: position of
    the first token. `in_window`: they attend only within a layer's window."""

    table: int
    start: int
    stop: int
    position: int
    in_window: bool = True


def mix_blocks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, heads: AttentionHeads, blocks: Sequence[TokenBlock],
    out: Tensor,
) -> None:  # fmt: skip
    """Overwrite out [T, Hq, D] for the tokens of `blocks`. Each attends to all positions before its block's end, or within the
    window. q [T, Hq, D] is rotated; keys and values are already stored."""
    for table, start, stop, position, in_window in blocks:
        window = heads.window if in_window else None
        end = position + stop - start
        keys, values = (gather(cache, meta.block_tables[table], end) for cache in (k_cache, v_cache))
        for first in range(start, stop, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, stop)
            at = position + first - start
            low = 0 if window is None else max(0, at + 1 - window)
            positions = torch.arange(at, at + last - first, device=q.device)[:, None]
            key_positions = torch.arange(low, end, device=q.device)
            hidden = torch.zeros((last - first, end - low), dtype=torch.bool, device=q.device)
            if window is not None:
                hidden = key_positions <= positions - window
            out[first:last] = attend_hidden(
                q[first:last], keys[:, low:], values[:, low:], hidden, heads.scale, heads.softcap, heads.sinks, None
            )
