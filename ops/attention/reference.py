"""Causal attention over the paged cache in plain torch: gathers each row's context, then softmax(q k^T) v by its book.

Any float dtype, any device, and int8 caches; math in float32, or float64 for float64 queries. It reads the row lengths on the
host."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.attention.meta import AttentionMeta
from ops.kv.lines import from_lines

QUERY_CHUNK = 256  # queries scored at once: bounds the score matrix of a long prompt


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lens = meta.query_starts.tolist(), meta.context_lens.tolist()
    for row, context_len in enumerate(lens):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        table = meta.block_tables[row if meta.rows is None else max(int(meta.rows[row]), 0)]
        keys, values = (_gather(cache, table, context_len) for cache in (k_cache, v_cache))
        for chunk in range(start, end, QUERY_CHUNK):
            stop = min(chunk + QUERY_CHUNK, end)
            first = context_len - (end - chunk)  # position of the chunk's first query, which sees the earliest key
            low = 0 if window is None else max(0, first + 1 - window)
            seen = keys[:, low:], values[:, low:]
            out[chunk:stop] = _attend(q[chunk:stop], *seen, first - low, scale, window, softcap, sinks, alibi)
    return out


def _gather(cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """The context of one row, [heads, context_len, D], in the cache's dtype, or float32 of an int8 cache."""
    block_size = cache.shape[2]
    blocks = cache[table[: -(-context_len // block_size)].long()]
    context = blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]
    return from_lines(context) if cache.dtype == torch.int8 else context


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, first_position: int, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, alibi: Tensor | None,
) -> Tensor:  # fmt: skip
    """q [n, Hq, D], the first one beside key `first_position`; keys, values [Hkv, context, D]. Returns [n, Hq, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_queries, num_heads, head_size = q.shape
    groups = q.to(wide).transpose(0, 1).reshape(keys.shape[0], -1, head_size)  # a kv head's query heads side by side
    scores = (groups @ keys.to(wide).transpose(1, 2) * scale).view(num_heads, num_queries, -1)
    query_positions = torch.arange(first_position, first_position + num_queries, device=q.device)
    key_positions = torch.arange(keys.shape[1], device=q.device)
    hidden = key_positions > query_positions[:, None]
    if window is not None:
        hidden |= key_positions <= query_positions[:, None] - window
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if alibi is not None:
        scores -= alibi.to(wide)[:, None, None] * (query_positions[:, None] - key_positions)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, num_queries, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    mixed = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values.to(wide)
    return mixed.view(num_heads, num_queries, head_size).transpose(0, 1).to(q.dtype)
