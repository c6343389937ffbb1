"""Latent attention in Triton. All heads of a token read the same keys, whose first dims are the values, so they are loaded once for
both.

As in `triton_paged.py`, the device reads lengths and tables, and grids depend on shapes only. For rows of one query, several
programs share the context. Longer rows are divided into tiles of queries. A row of a matrix product is one head of one query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.heads import LatentHeads
from ops.attention.meta import AttentionMeta
from ops.attention.triton_paged import (
    HIDDEN,
    LOG2E,
    NONE_YET,
    fold,
    is_wide,
    join,
    keys_at,
    num_splits_for,
    precision,
    split_span,
    table_of,
)
from ops.kv import read_scales
from ops.kv.triton_entries import as_stored
from ops.launch import overlap, wait_for_previous


@triton.jit
def _rotate_store(
    q_ptr, latent_ptr, positions_ptr, cos_sin_ptr, cache_ptr, slot_mapping_ptr, per_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, RANK_LANES: tl.constexpr, HALF_LANES: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (token, PART heads of q), and one more per token for its key. q [tokens, HEADS, RANK + 2 * HALF] rotates in
    # place, latent [tokens, RANK + 2 * HALF] on its way into the cache [blocks, BLOCK, RANK + 2 * HALF], where it is multiplied by
    # per_scale if numbers of the cache are of eight bits.
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    SIZE: tl.constexpr = RANK + 2 * HALF
    PARTS: tl.constexpr = (HEADS + PART - 1) // PART
    half = tl.arange(0, HALF_LANES)[None, :]
    in_half = half < HALF
    wait_for_previous(PDL)
    angle = cos_sin_ptr + tl.load(positions_ptr + token) * 2 * HALF
    cos = tl.load(angle + half, mask=in_half, other=0.0)
    sin = tl.load(angle + HALF + half, mask=in_half, other=0.0)
    head = part * PART + tl.arange(0, PART)[:, None]
    is_head = (head < HEADS) & in_half
    from_ptr = q_ptr + (token * HEADS + head) * SIZE + RANK
    slot = tl.load(slot_mapping_ptr + token)
    if part == PARTS:
        if slot < 0:
            return
        is_head = (head == PARTS * PART) & in_half
        from_ptr = latent_ptr + token * SIZE + RANK + head * 0
        rank = tl.arange(0, RANK_LANES)
        latent = tl.load(latent_ptr + token * SIZE + rank, mask=rank < RANK)
        tl.store(cache_ptr + slot * SIZE + rank, as_stored(latent, cache_ptr, per_scale), mask=rank < RANK)
    x = tl.load(from_ptr + 2 * half, mask=is_head, other=0.0).to(tl.float32)
    y = tl.load(from_ptr + 2 * half + 1, mask=is_head, other=0.0).to(tl.float32)
    even, odd = x * cos - y * sin, y * cos + x * sin
    if part == PARTS:
        to_ptr = cache_ptr + slot * SIZE + RANK + head * 0
        tl.store(to_ptr + 2 * half, as_stored(even, cache_ptr, per_scale), mask=is_head)
        tl.store(to_ptr + 2 * half + 1, as_stored(odd, cache_ptr, per_scale), mask=is_head)
    else:
        tl.store(from_ptr + 2 * half, even.to(q_ptr.dtype.element_ty), mask=is_head)
        tl.store(from_ptr + 2 * half + 1, odd.to(q_ptr.dtype.element_ty), mask=is_head)


@triton.jit
def _walk(
    q_ptr, cache_ptr, table_ptr, row, is_row, position, first, last, scale_log2,
    RANK: tl.constexpr, ROTARY: tl.constexpr, RANK_LANES: tl.constexpr, ROTARY_LANES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Rows `row` of q [tokens * heads, RANK + ROTARY], each at `position`, over keys first .. last: their running softmax.
    ROWS: tl.constexpr = row.shape[0]
    SIZE: tl.constexpr = RANK + ROTARY
    rank = tl.arange(0, RANK_LANES)[None, :]
    rotary = tl.arange(0, ROTARY_LANES)[None, :]
    q_at = q_ptr + (row * SIZE)[:, None]
    q = tl.load(q_at + rank, mask=is_row[:, None] & (rank < RANK), other=0.0)
    q_rotary = tl.load(q_at + RANK + rotary, mask=is_row[:, None] & (rotary < ROTARY), other=0.0)
    best = tl.full((ROWS,), NONE_YET, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, RANK_LANES), tl.float32)
    for start in range(first, last, TILE):
        key = start + tl.arange(0, TILE)
        inside = (key < last)[:, None]
        at = cache_ptr + keys_at(table_ptr, start, last, 0, 1, SIZE, BLOCK, TILE, WIDE)[:, None]
        latent = tl.load(at + rank, mask=inside & (rank < RANK), other=0.0).to(q.dtype)
        key_rotary = tl.load(at + RANK + rotary, mask=inside & (rotary < ROTARY), other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rotary, tl.trans(key_rotary), scores, input_precision=PRECISION)
        visible = (key < last)[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, HIDDEN)
        best, total, mixed = fold(scores, latent, best, total, mixed, scale_log2, PRECISION)
    return best, total, mixed


@triton.jit
def _decode(
    q_ptr, cache_ptr, tables_ptr, rows_ptr, starts_ptr, lens_ptr, out_ptr, part_ptr, lse_ptr, scale_log2, out_scale, table_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, RANK_LANES: tl.constexpr,
    ROTARY_LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, ROWS heads, split); as `triton_paged._decode`.
    request = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    wait_for_previous(PDL)
    token = tl.load(starts_ptr + request)
    context = tl.load(lens_ptr + request)
    span = split_span(context, num_splits, TILE)
    first = split * span
    if (tl.load(starts_ptr + request + 1) - token != 1) | (first >= context):
        return
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = token.to(tl.int64) * HEADS + head
    table_ptr = table_of(tables_ptr, rows_ptr, table_stride, request)
    best, total, mixed = _walk(
        q_ptr, cache_ptr, table_ptr, row, head < HEADS, context + head * 0, first, tl.minimum(first + span, context),
        scale_log2, RANK, ROTARY, RANK_LANES, ROTARY_LANES, BLOCK, TILE, WIDE, PRECISION,
    )  # fmt: skip
    mixed = mixed * out_scale / total[:, None]
    rank = tl.arange(0, RANK_LANES)[None, :]
    stored = (head < HEADS)[:, None] & (rank < RANK)
    if span >= context:
        tl.store(out_ptr + (row * RANK)[:, None] + rank, mixed.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        part = ((request * HEADS + head) * num_splits + split).to(tl.int64)
        tl.store(part_ptr + (part * RANK)[:, None] + rank, mixed, mask=stored)
        tl.store(lse_ptr + part, best + tl.log2(total), mask=head < HEADS)


@triton.jit(do_not_specialize=["num_requests"])
def _extend(
    q_ptr, cache_ptr, tables_ptr, rows_ptr, starts_ptr, lens_ptr, out_ptr, scale_log2, out_scale, num_requests, table_stride,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr,
    RANK_LANES: tl.constexpr, ROTARY_LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, REQUESTS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, tile of TOKENS queries, PACK heads), found by counting tiles as `triton_paged._spans` does.
    program = tl.program_id(0)
    SHARES: tl.constexpr = (HEADS + PACK - 1) // PACK
    wait_for_previous(PDL)
    each = tl.arange(0, REQUESTS)
    is_request = each < num_requests
    start = tl.load(starts_ptr + each, mask=is_request, other=0)
    num_queries = tl.load(starts_ptr + each + 1, mask=is_request, other=0) - start
    upto = tl.cumsum(tl.where(num_queries > 1, tl.cdiv(num_queries, TOKENS), 0) * SHARES, 0)
    request = tl.sum((upto <= program).to(tl.int32), 0)
    if request >= num_requests:
        return
    local = program - tl.max(tl.where(upto <= program, upto, 0), 0)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    context = tl.load(lens_ptr + request)
    tile = tl.cdiv(num_queries, TOKENS) - 1 - local // SHARES  # those with most keys first
    m = tl.arange(0, TOKENS * PACK)
    query = tile * TOKENS + m // PACK
    head = local % SHARES * PACK + m % PACK
    is_row = (query < num_queries) & (head < HEADS)
    row = (start + query).to(tl.int64) * HEADS + head
    position = context - num_queries + query
    end = tl.minimum(context, context - num_queries + (tile + 1) * TOKENS)
    table_ptr = table_of(tables_ptr, rows_ptr, table_stride, request)
    _, total, mixed = _walk(
        q_ptr, cache_ptr, table_ptr, row, is_row, position, 0, end, scale_log2, RANK, ROTARY, RANK_LANES, ROTARY_LANES,
        BLOCK, TILE, WIDE, PRECISION,
    )  # fmt: skip
    rank = tl.arange(0, RANK_LANES)[None, :]
    out_at = out_ptr + (row * RANK)[:, None] + rank
    tl.store(
        out_at, (mixed * out_scale / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (rank < RANK)
    )


def attend_latent(
    q: Tensor,
    latent: Tensor,
    heads: LatentHeads,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """Compute `ops.attend_latent` for contiguous q and latent. Results of padding tokens are undefined."""
    num_tokens, rotary = q.shape[0], heads.cos_sin.shape[1]
    out = torch.empty((num_tokens, heads.num_heads, heads.rank), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    launch = overlap(q.device)
    kv_scale, _ = read_scales(cache, (heads.kv_scale, heads.kv_scale))
    part = min(16, triton.next_power_of_2(heads.num_heads))
    _rotate_store[(num_tokens, triton.cdiv(heads.num_heads, part) + 1)](
        q, latent, positions, heads.cos_sin, cache, slot_mapping, 1 / kv_scale, HEADS=heads.num_heads, RANK=heads.rank,
        HALF=rotary // 2, RANK_LANES=triton.next_power_of_2(heads.rank), HALF_LANES=triton.next_power_of_2(rotary // 2), PART=part,
        BLOCK=cache.shape[2], num_warps=4, **launch,
    )  # fmt: skip
    common = {
        "HEADS": heads.num_heads, "RANK": heads.rank, "ROTARY": rotary,
        "RANK_LANES": max(16, triton.next_power_of_2(heads.rank)), "ROTARY_LANES": max(16, triton.next_power_of_2(rotary)),
        "BLOCK": cache.shape[2], "WIDE": is_wide(cache), "PRECISION": precision(q), **launch,
    }  # fmt: skip
    lengths = None if meta.spans is None else [end - start for start, end, _ in meta.spans]
    if meta.max_query_len > 1 and (lengths is None or any(length > 1 for length in lengths)):
        _run_extend(q, cache, meta, heads, kv_scale, common, out)
    if meta.seq_lens.shape[0] and (lengths is None or 1 in lengths):
        _run_decode(q, cache, meta, heads, kv_scale, common, out)
    return out


def _run_extend(
    q: Tensor, cache: Tensor, meta: AttentionMeta, heads: LatentHeads, kv_scale: float, common: dict[str, object],
    out: Tensor,
) -> None:  # fmt: skip
    by = tuning.of(q.device).attention.latent
    how = by.float32_prefill if q.dtype == torch.float32 else by.prefill
    num_tokens, num_requests = q.shape[0], meta.seq_lens.shape[0]
    pack = min(how.rows, triton.next_power_of_2(heads.num_heads))
    tokens = how.rows // pack
    max_tiles = num_tokens // tokens + min(num_requests, num_tokens // 2)
    _extend[(max_tiles * triton.cdiv(heads.num_heads, pack),)](
        q, cache, meta.block_tables, meta.rows, meta.query_start_loc, meta.seq_lens, out, heads.scale * kv_scale * LOG2E,
        kv_scale, num_requests, meta.block_tables.stride(0), TOKENS=tokens, PACK=pack, TILE=how.keys,
        REQUESTS=128 if num_requests <= 128 else max(1024, triton.next_power_of_2(num_requests)), num_warps=how.warps,
        num_stages=how.stages, **common,
    )  # fmt: skip


def _run_decode(
    q: Tensor, cache: Tensor, meta: AttentionMeta, heads: LatentHeads, kv_scale: float, common: dict[str, object],
    out: Tensor,
) -> None:  # fmt: skip
    by = tuning.of(q.device)
    tiles = by.attention.latent
    how = tiles.float32_decode if q.dtype == torch.float32 else tiles.decode
    num_requests, shares = meta.seq_lens.shape[0], triton.cdiv(heads.num_heads, how.rows)
    splits = num_splits_for(num_requests * shares, meta.max_seq_len, how.min_keys, by)
    shape = (num_requests, heads.num_heads, splits) if splits > 1 else (1,)
    part = torch.empty((*shape, heads.rank), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode[(num_requests, shares, splits)](
        q, cache, meta.block_tables, meta.rows, meta.query_start_loc, meta.seq_lens, out, part, lse,
        heads.scale * kv_scale * LOG2E, kv_scale, meta.block_tables.stride(0), ROWS=how.rows, TILE=how.keys, num_warps=how.warps,
        num_stages=how.stages, **common,
    )  # fmt: skip
    if splits > 1:
        join[(heads.num_heads, num_requests)](
            part, lse, meta.query_start_loc, meta.seq_lens, None, out, splits, HEADS=heads.num_heads, HEAD=heads.rank,
            LANES=triton.next_power_of_2(heads.rank), TILE=how.keys, WINDOW=0, SPLITS=by.attention.max_splits, num_warps=4,
            **overlap(q.device),
        )  # fmt: skip
