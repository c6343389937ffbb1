"""Paged attention in Triton: one kernel for steps in which every row has one query, one for any mix of spans.

Both pack the query heads that share a kv head into the rows of one matrix product, so keys and values are read once per
group; both read lengths and tables from device memory, so a captured graph serves any lengths. Decode splits the context
over programs to fill the device at small batches and joins the parts (Dao et al. 2023, Flash-Decoding); the other walks
its context in order with a running softmax (Milakov and Gimelshein 2018)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention.meta import AttentionMeta

LOG2E = 1.4426950408889634  # exp2 is one instruction on the device, exp two


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, part_ptr, lse_ptr, scale_log2, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # q, out [rows, KV_HEADS * GROUP, HEAD]; caches [blocks, KV_HEADS, BLOCK, HEAD]; part [rows, heads, SPLITS, HEAD]
    # float32 and lse [rows, heads, SPLITS] float32, base 2. GROUP_PAD >= 16: the least number of rows of a matrix product.
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + row)
    span = tl.cdiv(tl.cdiv(context, TILE), SPLITS) * TILE
    first = split * span
    last = tl.minimum(first + span, context)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD)
    head = kv_head * GROUP + member
    is_member = member < GROUP
    q_offset = (row * KV_HEADS * GROUP + head)[:, None] * HEAD + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=is_member[:, None], other=0.0)
    best = tl.full((GROUP_PAD,), -1e30, tl.float32)  # finite, so an empty split divides nothing by nothing
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, HEAD), tl.float32)
    for start in range(first, last, TILE):
        key = start + tl.arange(0, TILE)
        inside = key < last
        block = tl.load(tables_ptr + row * table_stride + key // BLOCK, mask=inside, other=0).to(tl.int64)
        line = ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK)[:, None] * HEAD + dim[None, :]
        k = tl.load(k_ptr + line, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(inside[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_ptr + line, mask=inside[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    if SPLITS == 1:
        result = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(out_ptr + q_offset, result.to(out_ptr.dtype.element_ty), mask=is_member[:, None])
    else:
        part = (row * KV_HEADS * GROUP + head) * SPLITS + split
        safe_total = tl.maximum(total, 1e-30)
        tl.store(part_ptr + part[:, None] * HEAD + dim[None, :], mixed / safe_total[:, None], mask=is_member[:, None])
        tl.store(lse_ptr + part, best + tl.log2(safe_total), mask=is_member)


@triton.jit
def _join(part_ptr, lse_ptr, out_ptr, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    # One program per (row, head): the splits' averages, weighted by their share of the softmax's sum.
    line = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD)
    lse = tl.load(lse_ptr + line * SPLITS + split)
    share = tl.exp2(lse - tl.max(lse, 0))
    share = share / tl.sum(share, 0)
    part = tl.load(part_ptr + (line * SPLITS + split)[:, None] * HEAD + dim[None, :])
    result = tl.sum(part * share[:, None], 0)
    tl.store(out_ptr + line * HEAD + dim, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _spans(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, out_ptr, scale_log2, table_stride, q_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One program per (tile of TOKENS queries, kv head, row); line m of the product is query m // GROUP_PAD, head m % GROUP_PAD.
    # Last tiles first: they see the most keys, and a long program that starts last would run alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(starts_ptr + row)
    num_queries = tl.load(starts_ptr + row + 1) - start
    if tile * TOKENS >= num_queries:
        return
    context = tl.load(lens_ptr + row)
    line = tl.arange(0, TOKENS * GROUP_PAD)
    query = tile * TOKENS + line // GROUP_PAD
    member = line % GROUP_PAD
    valid = (query < num_queries) & (member < GROUP)
    dim = tl.arange(0, HEAD)
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + member
    q = tl.load(q_ptr + (token * q_stride + head * HEAD)[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
    position = context - num_queries + query
    best = tl.full((TOKENS * GROUP_PAD,), -1e30, tl.float32)
    total = tl.zeros((TOKENS * GROUP_PAD,), tl.float32)
    mixed = tl.zeros((TOKENS * GROUP_PAD, HEAD), tl.float32)
    first_position = context - num_queries + tile * TOKENS
    end = tl.minimum(context, first_position + TOKENS)
    unmasked = (first_position + 1) // TILE * TILE  # keys that every query of the tile sees
    for begin in range(0, end, TILE):
        key = begin + tl.arange(0, TILE)
        block = tl.load(tables_ptr + row * table_stride + key // BLOCK, mask=key < context, other=0).to(tl.int64)
        where = ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK)[:, None] * HEAD + dim[None, :]
        k = tl.load(k_ptr + where, mask=(key < context)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if begin >= unmasked:
            scores = tl.where(key[None, :] <= position[:, None], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_ptr + where, mask=(key < context)[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    result = mixed / tl.maximum(total, 1e-30)[:, None]
    out_offset = (token * KV_HEADS * GROUP + head)[:, None] * HEAD + dim[None, :]
    tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float) -> Tensor:
    """q [T, Hq, D], D a power of two; see `ops.paged_attention`. Padding rows have context length 0 and get zeros."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = _run_decode if meta.max_query_len == 1 and q.shape[0] == meta.context_lens.shape[0] else _run_spans
    run(q, k_cache, v_cache, meta, scale * LOG2E, out)
    return out


def _run_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale_log2: float, out: Tensor
) -> None:
    num_rows, num_heads, head_size = q.shape
    kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // kv_heads
    splits = _num_splits(num_rows * kv_heads, meta.max_context_len, q.device)
    shape = (num_rows, num_heads, splits) if splits > 1 else (1,)
    part = torch.empty((*shape, head_size) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode[(num_rows, kv_heads, splits)](
        q.contiguous(), k_cache, v_cache, meta.block_tables, meta.context_lens, out, part, lse, scale_log2,
        meta.block_tables.stride(0), KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD=head_size, BLOCK=block_size, TILE=64 if head_size <= 128 else 32, SPLITS=splits, PRECISION=_precision(q),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join[(num_rows * num_heads,)](part, lse, out, HEAD=head_size, SPLITS=splits, num_warps=2)


def _run_spans(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale_log2: float, out: Tensor
) -> None:
    num_heads, head_size = q.shape[1:]
    kv_heads, block_size = k_cache.shape[1:3]
    group_pad = triton.next_power_of_2(num_heads // kv_heads)
    tokens = max(1, (128 if head_size <= 128 else 64) // group_pad)
    grid = (triton.cdiv(meta.max_query_len, tokens), kv_heads, meta.context_lens.shape[0])
    _spans[grid](
        q, k_cache, v_cache, meta.block_tables, meta.query_starts, meta.context_lens, out, scale_log2,
        meta.block_tables.stride(0), q.stride(0), KV_HEADS=kv_heads, GROUP=num_heads // kv_heads, GROUP_PAD=group_pad,
        HEAD=head_size, BLOCK=block_size, TOKENS=tokens, TILE=64 if head_size <= 128 else 32, PRECISION=_precision(q),
        num_warps=8 if tokens * group_pad >= 128 and head_size >= 128 else 4, num_stages=3,
    )  # fmt: skip


def _precision(q: Tensor) -> str:
    """Float32 means float32: tf32 would differ from every reference in the third digit."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """A power of two: two programs a multiprocessor where the batch does not give as many, 256 keys a split at least."""
    wanted = 2 * _num_processors(device) // max(1, num_programs)
    return max(1, min(1 << max(0, wanted.bit_length() - 1), triton.next_power_of_2(triton.cdiv(max_context, 256)), 32))


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
