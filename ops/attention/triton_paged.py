"""Paged attention in Triton for any mix of rows: one kernel for rows with one query, and one for rows with more.

Both read lengths and tables from device memory, and grids depend on shapes only, so a captured graph serves any mix. For single
queries, the query heads of a KV head are one matrix product. At small batches, the context is split over programs to fill the
device, and the parts are merged (Dao et al. 2023, Flash-Decoding). Longer rows are divided into tiles of queries that iterate over
their context with a running softmax (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2): first over the keys that every query
of the tile sees, without a mask, then over the others."""

from __future__ import annotations

from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.meta import AttentionMeta, num_elements
from ops.kv.eight_bits import scales_of
from ops.launch import overlap, wait_for_previous
from ops.tuning.numbers import PagedTuning, QueryTiles, Tuning

LOG2E = 1.4426950408889634  # exp2 is one instruction on the device, exp two
HIDDEN = tl.constexpr(-1e30)  # score of a masked key
# Maximum score of a row in which all keys are masked. If it were HIDDEN, a masked key's weight would be 2 to the difference
# of two equal, enormous numbers, one of them unrounded: infinity if a multiply-add is fused.
NONE_YET = tl.constexpr(-1e20)


@triton.jit
def keys_at(
    table_ptr, begin, context, kv_head, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Offsets of keys begin .. begin + TILE (begin a multiple of TILE) in a cache [blocks, KV_HEADS, BLOCK, HEAD], in elements.
    each = tl.arange(0, TILE)
    key = begin + each
    if TILE % BLOCK == 0:  # only `begin` changes from tile to tile
        page = begin // BLOCK + each // BLOCK
        offset = each % BLOCK
    else:
        page = key // BLOCK
        offset = key % BLOCK
    block = tl.load(table_ptr + page, mask=key < context, other=0)
    if WIDE:
        block = block.to(tl.int64)
    return ((block * KV_HEADS + kv_head) * BLOCK + offset) * HEAD


@triton.jit
def load_entries(ptr, scales_ptr, at, dim, inside, loaded, like, HEAD: tl.constexpr, MASKED: tl.constexpr):
    # Keys or values that begin at `at` [keys], in elements, as numbers of `like`'s type [keys, dims]; `inside` [keys] and `loaded`
    # [keys, dims] guard what is read. scales_ptr: of int8 entries, the same cache as float32 (ops/kv/eight_bits.py).
    where = at[:, None] + dim[None, :]
    if scales_ptr is not None:  # entries are aligned to 4 bytes, but Triton 3.6 assumes 16
        where = tl.multiple_of(tl.max_contiguous(where, [1, 4]), [4, 4])
    if MASKED:
        x = tl.load(ptr + where, mask=loaded, other=0.0)
    else:
        x = tl.load(ptr + where)
    if scales_ptr is not None:
        x = x.to(tl.float32) * tl.load(scales_ptr + (at + HEAD) // 4, mask=inside, other=0.0)[:, None]
    return x.to(like.dtype)


@triton.jit
def fold(scores, v, best, total, mixed, scale_log2, PRECISION: tl.constexpr):
    # One step of the running softmax, in base 2. The scale is positive and goes into one multiply-add with the maximum.
    new_best = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
    return new_best, total, mixed


@triton.jit
def with_sink(total, best, sinks_ptr, head, is_head):
    # The softmax's sums [rows], relative to `best` in base 2, with each row's sink among the scores.
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
    return total


@triton.jit
def table_of(tables_ptr, rows_ptr, table_stride, request):
    row = request
    if rows_ptr is not None:
        row = tl.maximum(tl.load(rows_ptr + request), 0)
    return tables_ptr + row.to(tl.int64) * table_stride


@triton.jit
def split_span(context, num_splits, TILE: tl.constexpr):
    # Of `context` keys, those per split, whole tiles: `_decode` and `join` agree on it.
    return tl.cdiv(tl.cdiv(context, TILE), num_splits) * TILE


@triton.jit(do_not_specialize=["num_splits"])
def join(
    part_ptr, lse_ptr, starts_ptr, lens_ptr, sinks_ptr, out_ptr, num_splits, HEADS: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (head, request): the splits' averages, weighted by their share of the softmax's sum. SPLITS >= num_splits.
    head = tl.program_id(0)
    request = tl.program_id(1)
    wait_for_previous(PDL)
    token = tl.load(starts_ptr + request)
    context = tl.load(lens_ptr + request)
    if WINDOW > 0:
        context -= tl.maximum(context - WINDOW, 0) // TILE * TILE  # masked keys are excluded
    span = split_span(context, num_splits, TILE)
    if (tl.load(starts_ptr + request + 1) - token != 1) | (span >= context):
        return  # not a single query, or `_decode` used one split and wrote the result itself
    split = tl.arange(0, SPLITS)
    used = split * span < context
    dim = tl.arange(0, LANES)
    part = (request * HEADS + head).to(tl.int64) * num_splits + split
    lse = tl.load(lse_ptr + part, mask=used, other=-1e30)
    best = tl.max(lse, 0)
    share = tl.exp2(lse - best)
    share = share / with_sink(tl.sum(share, 0), best, sinks_ptr, head, head < HEADS)
    loaded = used[:, None] & (dim < HEAD)[None, :]
    mixed = tl.load(part_ptr + part[:, None] * HEAD + dim[None, :], mask=loaded, other=0.0)
    result = tl.sum(mixed * share[:, None], 0)
    out_at = (token.to(tl.int64) * HEADS + head) * HEAD + dim
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD)


def precision(q: Tensor) -> str:
    """Return the `input_precision` of tl.dot: "ieee" for float32, where tf32 would change the third digit."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def is_wide(cache: Tensor) -> bool:
    """Return whether offsets into the cache need 64 bits, which cost twice the instructions."""
    return num_elements(cache) >= 2**31


def num_splits_for(num_programs: int, max_context: int, min_keys: int, by: Tuning) -> int:
    """Return the number of parts of a context, a power of two. They are enough to fill the device, and each has at least `min_keys`
    keys."""
    wanted = by.attention.programs_per_multiprocessor * by.multiprocessors // max(1, num_programs)
    most = triton.next_power_of_2(triton.cdiv(max_context, min_keys))
    return max(1, min(1 << max(0, wanted.bit_length() - 1), most, by.attention.max_splits))


NEVER = 2**31 - 1


class Limits(TypedDict):
    """Compile-time constants that limit attention. 0 means no limit; heads without limits then compile to code without checks."""

    WINDOW: int
    SOFTCAP: float


@triton.jit
def _capped(scores, scale_log2, SOFTCAP: tl.constexpr):
    # SOFTCAP * tanh(scores * scale / SOFTCAP), in the units of `fold`: with a scale of LOG2E.
    return SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores * (scale_log2 * (2.0 / SOFTCAP))) + 1.0)


@triton.jit
def _biased(scores, slopes_ptr, head, is_head, distance, scale):
    # In base 2: scores [rows, keys] times `scale`, less each row's slope times the distance of query and key, [rows or 1, keys].
    slope = tl.load(slopes_ptr + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
    return scores * scale - slope[:, None] * distance.to(tl.float32)


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, rows_ptr, starts_ptr, lens_ptr, sinks_ptr, slopes_ptr, out_ptr,
    part_ptr, lse_ptr, scale_log2, out_scale,
    table_stride, q_stride, q_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr, ENTRY: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, kv head, split); requests that have not exactly one query are not ours. part [R, heads, splits,
    # HEAD] and lse [R, heads, splits] float32, base 2. GROUP_PAD >= 16: the least number of rows of a matrix product.
    # The number of splits is no constexpr: one compiled kernel serves every batch size.
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    wait_for_previous(PDL)
    token = tl.load(starts_ptr + request)
    context = tl.load(lens_ptr + request)
    low = 0  # first visible key, rounded down to a whole tile
    if WINDOW > 0:
        low = tl.maximum(context - WINDOW, 0) // TILE * TILE
    span = split_span(context - low, num_splits, TILE)
    first = low + split * span
    if (tl.load(starts_ptr + request + 1) - token != 1) | (first >= context):
        return
    last = tl.minimum(first + span, context)
    table_ptr = table_of(tables_ptr, rows_ptr, table_stride, request)
    token = token.to(tl.int64)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, LANES)
    head = kv_head * GROUP + member
    is_member = (member < GROUP)[:, None] & (dim < HEAD)[None, :]
    q_at = (token * q_stride + head * q_head_stride)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_member, other=0.0)
    best = tl.full((GROUP_PAD,), NONE_YET, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, LANES), tl.float32)
    fold_scale = scale_log2
    if SOFTCAP > 0:
        fold_scale = 1.4426950408889634
    next_keys = keys_at(table_ptr, first, last, kv_head, KV_HEADS, ENTRY, BLOCK, TILE, WIDE)
    for start in range(first, last, TILE):
        inside = start + tl.arange(0, TILE) < last
        if WINDOW > 0:
            inside = inside & (start + tl.arange(0, TILE) >= context - WINDOW)
        loaded = inside[:, None]
        if HEAD != LANES:
            loaded = loaded & (dim < HEAD)[None, :]
        k = load_entries(k_ptr, k_scales_ptr, next_keys, dim, inside, loaded, q, HEAD, True)
        v = load_entries(v_ptr, v_scales_ptr, next_keys, dim, inside, loaded, q, HEAD, True)
        # The next tile's block ids are prefetched, so loading its keys need not wait for them.
        next_keys = keys_at(table_ptr, start + TILE, last, kv_head, KV_HEADS, ENTRY, BLOCK, TILE, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = _capped(scores, scale_log2, SOFTCAP)
        if slopes_ptr is not None:
            distance = (context - 1 - start - tl.arange(0, TILE))[None, :]
            scores = _biased(scores, slopes_ptr, head, member < GROUP, distance, fold_scale)
            scores = tl.where(inside[None, :], scores, HIDDEN)
            best, total, mixed = fold(scores, v, best, total, mixed, 1.0, PRECISION)
        else:
            scores = tl.where(inside[None, :], scores, HIDDEN)
            best, total, mixed = fold(scores, v, best, total, mixed, fold_scale, PRECISION)
    mixed *= out_scale
    if span >= context - low:
        total = with_sink(total, best, sinks_ptr, head, member < GROUP)
        out_at = (token * KV_HEADS * GROUP + head)[:, None] * HEAD + dim[None, :]
        tl.store(out_ptr + out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_member)
    else:
        part = ((request * KV_HEADS * GROUP + head) * num_splits + split).to(tl.int64)
        tl.store(part_ptr + part[:, None] * HEAD + dim[None, :], mixed / total[:, None], mask=is_member)
        tl.store(lse_ptr + part, best + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["num_requests", "max_queries"])
def _extend(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, rows_ptr, starts_ptr, lens_ptr, sinks_ptr, slopes_ptr, out_ptr,
    scale_log2, out_scale, num_requests, max_queries,
    table_stride, q_stride, q_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, HEAD: tl.constexpr, ENTRY: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, kv head, tile of TOKENS queries, query head), or one for the whole group when it is packed (PACK
    # > 1, a power of two >= GROUP); row m of the product is query m // PACK of the tile and head m % PACK of the group.
    # The grid is an upper bound: a program finds its request by counting tiles; programs after the last tile have none.
    program = tl.program_id(0)
    SHARES: tl.constexpr = GROUP if PACK == 1 else 1
    wait_for_previous(PDL)
    each = tl.arange(0, REQUESTS)
    is_request = each < num_requests
    start = tl.load(starts_ptr + each, mask=is_request, other=0)
    num_queries = tl.load(starts_ptr + each + 1, mask=is_request, other=0) - start
    context = tl.load(lens_ptr + each, mask=is_request, other=0)
    ours = (num_queries > 1) & (num_queries <= max_queries)
    upto = tl.cumsum(tl.where(ours, tl.cdiv(num_queries, TOKENS), 0) * (KV_HEADS * SHARES), 0)
    request = tl.sum((upto <= program).to(tl.int32), 0)
    if request >= num_requests:
        return
    local = program - tl.max(tl.where(upto <= program, upto, 0), 0)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    context = tl.load(lens_ptr + request)
    table_ptr = table_of(tables_ptr, rows_ptr, table_stride, request)
    # Programs that read the same keys are adjacent, those with most keys first: a long one should not start last.
    num_tiles = tl.cdiv(num_queries, TOKENS)
    kv_head = local // (num_tiles * SHARES)
    local = local % (num_tiles * SHARES)
    tile = num_tiles - 1 - local // SHARES
    m = tl.arange(0, TOKENS * PACK)
    query = tile * TOKENS + m // PACK
    if PACK == 1:
        head = kv_head * GROUP + local % SHARES + m * 0
        valid = query < num_queries
    else:
        head = kv_head * GROUP + m % PACK
        valid = (query < num_queries) & (m % PACK < GROUP)
    dim = tl.arange(0, LANES)
    token = (start + query).to(tl.int64)
    is_q = valid[:, None]
    in_head = (dim < HEAD)[None, :]
    if HEAD != LANES:
        is_q = is_q & in_head
    q = tl.load(q_ptr + (token * q_stride + head * q_head_stride)[:, None] + dim[None, :], mask=is_q, other=0.0)
    position = context - num_queries + query
    best = tl.full((TOKENS * PACK,), NONE_YET, tl.float32)
    total = tl.zeros((TOKENS * PACK,), tl.float32)
    mixed = tl.zeros((TOKENS * PACK, LANES), tl.float32)
    first_position = context - num_queries + tile * TOKENS
    end = tl.minimum(context, first_position + TOKENS)
    unmasked = (first_position + 1) // TILE * TILE  # keys before it are visible to all queries of the tile
    low = 0
    if WINDOW > 0:  # all key tiles are masked: a third loop for the window's edge is not worth it
        low = tl.maximum(first_position + 1 - WINDOW, 0) // TILE * TILE
        unmasked = low
    fold_scale = scale_log2
    if SOFTCAP > 0:
        fold_scale = 1.4426950408889634
    next_keys = keys_at(table_ptr, low, context, kv_head, KV_HEADS, ENTRY, BLOCK, TILE, WIDE)
    for begin in range(low, unmasked, TILE):
        inside = begin + tl.arange(0, TILE) < unmasked
        k = load_entries(k_ptr, k_scales_ptr, next_keys, dim, inside, in_head, q, HEAD, HEAD != LANES)
        v = load_entries(v_ptr, v_scales_ptr, next_keys, dim, inside, in_head, q, HEAD, HEAD != LANES)
        # Prefetched, as above.
        next_keys = keys_at(table_ptr, begin + TILE, context, kv_head, KV_HEADS, ENTRY, BLOCK, TILE, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = _capped(scores, scale_log2, SOFTCAP)
        if slopes_ptr is not None:
            distance = position[:, None] - (begin + tl.arange(0, TILE))[None, :]
            scores = _biased(scores, slopes_ptr, head, valid, distance, fold_scale)
            best, total, mixed = fold(scores, v, best, total, mixed, 1.0, PRECISION)
        else:
            best, total, mixed = fold(scores, v, best, total, mixed, fold_scale, PRECISION)
    for begin in range(unmasked, end, TILE):
        key = begin + tl.arange(0, TILE)
        inside = key < context
        if WINDOW > 0:
            inside = inside & (key > first_position - WINDOW)
        loaded = inside[:, None]
        if HEAD != LANES:
            loaded = loaded & in_head
        at = keys_at(table_ptr, begin, context, kv_head, KV_HEADS, ENTRY, BLOCK, TILE, WIDE)
        k = load_entries(k_ptr, k_scales_ptr, at, dim, inside, loaded, q, HEAD, True)
        v = load_entries(v_ptr, v_scales_ptr, at, dim, inside, loaded, q, HEAD, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = _capped(scores, scale_log2, SOFTCAP)
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        if slopes_ptr is not None:
            scores = _biased(scores, slopes_ptr, head, valid, position[:, None] - key[None, :], fold_scale)
            scores = tl.where(visible, scores, HIDDEN)
            best, total, mixed = fold(scores, v, best, total, mixed, 1.0, PRECISION)
        else:
            scores = tl.where(visible, scores, HIDDEN)
            best, total, mixed = fold(scores, v, best, total, mixed, fold_scale, PRECISION)
    total = with_sink(total, best, sinks_ptr, head, valid)
    out_at = (token * (KV_HEADS * GROUP) + head)[:, None] * HEAD + dim[None, :]
    tl.store(out_ptr + out_at, (mixed * out_scale / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_q)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    *,
    out: Tensor | None = None,
    max_queries: int = NEVER,
    singles: bool = True,
    out_scale: float = 1.0,
) -> Tensor:
    """Compute `ops.paged_attention` for q [T, Hq, D], whose last dim is contiguous.

    `scale` is positive. Results of padding tokens are undefined. `out` [T, Hq, D] contiguous: written instead of a new tensor.
    `out_scale` multiplies the result. Rows of more than `max_queries` queries are skipped, because another kernel computes them.
    Rows of one query are skipped unless `singles`."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tokens, num_requests = q.shape[0], meta.seq_lens.shape[0]
    if not num_tokens:
        return out
    limits: Limits = {"WINDOW": window or 0, "SOFTCAP": softcap or 0.0}
    lengths = None
    if meta.spans is not None:
        lengths = [end - start for start, end, _ in meta.spans if end - start <= max_queries]
    if min(meta.max_query_len, max_queries) > 1 and (lengths is None or any(length > 1 for length in lengths)):
        _run_extend(
            q, k_cache, v_cache, meta, scale * LOG2E, out_scale, limits, sinks, alibi, out, max_queries, lengths
        )
    if singles and num_requests and (lengths is None or 1 in lengths):
        _run_decode(q, k_cache, v_cache, meta, scale * LOG2E, out_scale, limits, sinks, alibi, out)
    return out


def _run_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale_log2: float, out_scale: float, limits: Limits,
    sinks: Tensor | None, alibi: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    num_requests, (num_heads, head_size) = meta.seq_lens.shape[0], q.shape[1:]
    kv_heads, block_size = k_cache.shape[1:3]
    lanes = max(64, triton.next_power_of_2(head_size))
    by = tuning.of(q.device)
    how = by.attention.paged.decode[lanes]
    max_keys = min(meta.max_seq_len, limits["WINDOW"] + how.keys - 1 if limits["WINDOW"] else NEVER)
    splits = num_splits_for(num_requests * kv_heads, max_keys, how.min_keys, by)
    shape = (num_requests, num_heads, splits) if splits > 1 else (1,)
    part = torch.empty((*shape, head_size), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    group = num_heads // kv_heads
    launch = overlap(q.device)
    _decode[(num_requests, kv_heads, splits)](
        q, k_cache, v_cache, scales_of(k_cache), scales_of(v_cache), meta.block_tables, meta.rows, meta.query_start_loc,
        meta.seq_lens, sinks, alibi, out, part, lse, scale_log2, out_scale, meta.block_tables.stride(0), q.stride(0), q.stride(1),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), HEAD=head_size,
        ENTRY=k_cache.shape[3], LANES=lanes, BLOCK=block_size, TILE=how.keys, **limits, WIDE=is_wide(k_cache),
        PRECISION=precision(q), num_warps=how.warps, num_stages=how.stages, **launch,
    )  # fmt: skip
    if splits > 1:
        join[(num_heads, num_requests)](
            part, lse, meta.query_start_loc, meta.seq_lens, sinks, out, splits, HEADS=num_heads, HEAD=head_size, LANES=lanes,
            TILE=how.keys, WINDOW=limits["WINDOW"], SPLITS=by.attention.max_splits, num_warps=4, **launch,
        )  # fmt: skip


def _run_extend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale_log2: float, out_scale: float, limits: Limits,
    sinks: Tensor | None, alibi: Tensor | None, out: Tensor, max_queries: int, lengths: list[int] | None,
) -> None:  # fmt: skip
    num_tokens, num_heads, head_size = q.shape
    kv_heads, block_size = k_cache.shape[1:3]
    group, num_requests = num_heads // kv_heads, meta.seq_lens.shape[0]
    lanes = max(64, triton.next_power_of_2(head_size))
    by = tuning.of(q.device)
    how = choose_tiles(q.dtype, lanes, num_tokens * num_heads, by.attention.paged, by.multiprocessors)
    pack = triton.next_power_of_2(group) if how.packed else 1
    tokens = max(1, how.rows // pack)
    if lengths is None:  # each span has at least two queries and at most one tile that is not full
        num_tiles = num_tokens // tokens + min(num_requests, num_tokens // 2)
    else:
        num_tiles = sum(triton.cdiv(length, tokens) for length in lengths if length > 1)
    _extend[(num_tiles * (kv_heads if how.packed else num_heads),)](
        q, k_cache, v_cache, scales_of(k_cache), scales_of(v_cache), meta.block_tables, meta.rows, meta.query_start_loc,
        meta.seq_lens, sinks, alibi, out, scale_log2, out_scale, num_requests, max_queries, meta.block_tables.stride(0),
        q.stride(0), q.stride(1), KV_HEADS=kv_heads, GROUP=group, PACK=pack, HEAD=head_size, ENTRY=k_cache.shape[3], LANES=lanes,
        BLOCK=block_size, TOKENS=tokens, TILE=how.keys,
        REQUESTS=128 if num_requests <= 128 else max(1024, triton.next_power_of_2(num_requests)), **limits, WIDE=is_wide(k_cache),
        PRECISION=precision(q), num_warps=how.warps, num_stages=how.stages, **overlap(q.device),
    )  # fmt: skip


def choose_tiles(dtype: torch.dtype, lanes: int, num_rows: int, by: PagedTuning, multiprocessors: int) -> QueryTiles:
    """Return the tile sizes for `num_rows` queries times heads. Large tiles are chosen if there is at least one for each
    multiprocessor."""
    if dtype == torch.float32:
        return by.float32_prefill[lanes]
    large = by.prefill[lanes]
    return large if num_rows >= large.rows * multiprocessors else by.small_prefill[lanes]
