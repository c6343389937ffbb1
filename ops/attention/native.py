"""Attention by oneloop_native: one kernel for prompt chunks and decodes, with float32 math and a float32, bfloat16 or int8 cache. A
second kernel attends within a step, without a cache, under a full mask.

A query's result depends only on its own keys, in order of position, and not on other rows or on chunking."""

from __future__ import annotations

from torch import Tensor

from ops.attention import reference
from ops.attention.meta import AttentionMeta
from ops.native import module as native


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, alibi: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if alibi is not None:  # not supported by the compiled kernel
        return reference.paged_attention(q, k_cache, v_cache, meta, scale, window, softcap, sinks, alibi)
    out = q.new_empty(*q.shape)
    # Most layers have none of these; they are the native function's defaults.
    plain = window is None and softcap is None and sinks is None
    limits = () if plain else (window or 0, softcap or 0.0, sinks)
    native.paged_attention(
        q, k_cache, v_cache, meta.query_start_loc, meta.seq_lens, meta.block_tables, scale, out, *limits
    )
    return out


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMeta, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention [T, Hq, D] within each row under a full mask, for q [T, Hq, D], k and v [T, Hkv, D]."""
    out = q.new_empty(*q.shape)
    native.packed_attention(q, k, v, meta.query_start_loc, scale, out, window or 0, softcap or 0.0, sinks)
    return out
