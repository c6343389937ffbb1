"""Attention of a layer on CUDA, from the output of the qkv projection to the heads' results. Chooses a kernel for each kind of row.

A step in which every row has one query is one kernel. Otherwise norms, rotation and storing run first, for all tokens. Then three
kernels compute rows with one query, rows with many queries, and rows in between. An fp8 context of long rows is first converted to
16 bits. The device reads which rows belong to which kernel, so one captured step serves any mix."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import tuning
from ops.attention import cuda, prefill, triton_paged, triton_widened
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.cuda import program
from ops.kv import read_scales
from ops.kv.eight_bits import FP8
from ops.rope.triton_qkv import norm_rope_store

HALVES = (torch.bfloat16, torch.float16)


def attend(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """Compute `ops.attend`. Results of padding tokens are undefined."""
    out = torch.empty((qkv.shape[0], heads.num_heads, heads.head_size), dtype=qkv.dtype, device=qkv.device)
    own = (
        qkv.dtype in HALVES
        and (k_cache.dtype == qkv.dtype or k_cache.dtype in cuda.NUMBERS)
        and program.missing() is None
        and not cuda.refusal(heads, k_cache, qkv.dtype)
    )
    if own and meta.uniform:
        cuda.decode(qkv, heads, k_cache, v_cache, meta, out, fused=True)
        return out.flatten(1)
    norm_rope_store(
        qkv, heads.num_heads, heads.num_kv_heads, heads.head_size, heads.norms, heads.norm_eps, positions, heads.cos_sin,
        k_cache, v_cache, slot_mapping, heads.kv_scales,
    )  # fmt: skip
    min_queries = _min_prefill_queries(qkv, heads, k_cache, meta)
    if min_queries <= meta.max_query_len:
        prefill.prefill(
            qkv, heads, k_cache, v_cache, meta, out, min_queries, _widened(qkv, heads, k_cache, v_cache, meta)
        )
    if own and (meta.spans is None or any(end - start == 1 for start, end, _ in meta.spans)):
        cuda.decode(qkv, heads, k_cache, v_cache, meta, out, fused=False)
    k_scale, v_scale = read_scales(k_cache, heads.kv_scales)
    triton_paged.paged_attention(
        heads.split(qkv)[0],
        k_cache,
        v_cache,
        meta,
        heads.scale * k_scale,
        heads.window,
        heads.softcap,
        heads.sinks,
        heads.alibi,
        out=out,
        max_queries=min_queries - 1,
        singles=not own,
        out_scale=v_scale,
    )
    return out.flatten(1)


def _min_prefill_queries(qkv: Tensor, heads: AttentionHeads, k_cache: Tensor, meta: AttentionMeta) -> int:
    """Return the number of queries from which prefill.cu computes a row. In a captured step, lengths are unknown; prefill.cu then
    computes all rows except single queries, which saves the launch of a second kernel. With an fp8 cache it always does so. The
    other kernel rounds differently, and a captured step would choose other tokens than an uncaptured one."""
    min_queries = tuning.of(qkv.device).attention.min_prefill_queries
    if meta.max_query_len < min_queries or program.missing_for_hopper():
        return triton_paged.NEVER
    if prefill.refusal(heads, k_cache, qkv.dtype, meta):
        return triton_paged.NEVER
    return 2 if meta.spans is None or k_cache.dtype == FP8 else min_queries


def _widened(
    qkv: Tensor, heads: AttentionHeads, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta
) -> triton_widened.Widened | None:
    """Return the fp8 cache of long rows, converted to 16 bits. None if there are no long rows, or if a window hides part of the
    context."""
    max_pages = _max_widened_pages(qkv, k_cache, meta)
    if k_cache.dtype != FP8 or heads.window is not None or not max_pages:
        return None
    by = tuning.of(qkv.device)
    return triton_widened.widen(
        k_cache, v_cache, meta, qkv.dtype, by.attention.min_widened_queries, max_pages,
        triton_widened.PROGRAMS * by.multiprocessors,
    )  # fmt: skip


def _max_widened_pages(qkv: Tensor, k_cache: Tensor, meta: AttentionMeta) -> int:
    """Return an upper bound of the pages to widen: the context of all possible long rows, at most the tuning's limit."""
    by = tuning.of(qkv.device).attention
    pages_of_row = -(-meta.max_seq_len // k_cache.shape[2])
    return min(qkv.shape[0] // by.min_widened_queries * pages_of_row, by.max_widened_bytes // (4 * k_cache[0].numel()))
