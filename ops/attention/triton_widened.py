"""What a cache of fp8 holds of prompts, in 16 bits and side by side, for the length of one layer: each page is widened once, where
attention over many queries would widen it again for every tile of them and every head."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.kv import read_scales
from ops.kv.fp8_numbers import UNSCALED
from ops.launch import overlap, wait_for_previous

_LANES = 2048
_PAGES = 2  # of a program
_REQUESTS = 256  # counted at once, at least: a kernel for few sizes


@triton.jit(do_not_specialize=["table_stride", "out_stride", "num_requests", "min_queries"])
def _widen(
    k_ptr, v_ptr, table_ptr, table_stride, rows_ptr, starts_ptr, lens_ptr, k_out_ptr, v_out_ptr, out_table_ptr, out_stride,
    num_requests, min_queries, v_scale,
    SIZE: tl.constexpr, NUMBERS: tl.constexpr, LANES: tl.constexpr, PAGES: tl.constexpr, REQUESTS: tl.constexpr,
    BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Pages of NUMBERS numbers, SIZE keys each, of requests of at least min_queries queries -> those of one behind those of another.
    wait_for_previous(PDL)
    each = tl.arange(0, REQUESTS)
    inside = each < num_requests
    queries = tl.load(starts_ptr + each + 1, mask=inside, other=0) - tl.load(starts_ptr + each, mask=inside, other=0)
    pages = (tl.load(lens_ptr + each, mask=inside, other=0) + SIZE - 1) // SIZE
    pages = tl.where(inside & (queries >= min_queries), pages, 0)
    ends = tl.cumsum(pages, 0)
    begin = tl.program_id(0) * PAGES
    for target in range(begin, tl.minimum(begin + PAGES, tl.sum(pages, 0))):
        request = tl.sum((ends <= target).to(tl.int32), 0)
        page = target - tl.sum(tl.where(each < request, pages, 0), 0)
        row = tl.maximum(tl.load(rows_ptr + request), 0) if BY_ROW else request
        source = tl.load(table_ptr + row.to(tl.int64) * table_stride + page).to(tl.int64) * NUMBERS
        tl.store(out_table_ptr + request * out_stride + page, target)
        for at in range(0, NUMBERS, LANES):
            lane = at + tl.arange(0, LANES)
            there = lane < NUMBERS
            k = tl.load(k_ptr + source + lane, mask=there, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + source + lane, mask=there, other=0.0).to(tl.float32) * v_scale
            tl.store(k_out_ptr + target * NUMBERS + lane, k.to(k_out_ptr.dtype.element_ty), mask=there)
            tl.store(v_out_ptr + target * NUMBERS + lane, v.to(v_out_ptr.dtype.element_ty), mask=there)


def fits(k_cache: Tensor, meta: AttentionMeta, min_queries: int, max_bytes: int) -> bool:
    """Whether the host knows the lengths of such a step, and what its requests of at least `min_queries` queries see takes no more
    than `max_bytes` in 16 bits, whose numbers an int32 counts."""
    num_pages = sum(_pages(k_cache, meta, min_queries))
    return 0 < 4 * num_pages * k_cache[0].numel() <= max_bytes


def widened(
    heads: AttentionHeads, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, min_queries: int, dtype: torch.dtype
) -> tuple[AttentionHeads, Tensor, Tensor, AttentionMeta]:
    """The same step over caches [pages, Hkv, 16, D] in `dtype` that hold what requests of at least `min_queries` queries see of
    caches of fp8 [num_blocks, Hkv, 16, D]; `fits`. Both 16-bit types hold all numbers of fp8; values are times their scale."""
    k_scale, v_scale = read_scales(k_cache, heads.kv_scales)
    by_request, shape, device = _pages(k_cache, meta, min_queries), k_cache.shape[1:], k_cache.device
    k_wide, v_wide = (torch.empty((sum(by_request), *shape), dtype=dtype, device=device) for _ in "kv")
    tables = torch.empty((meta.seq_lens.shape[0], max(by_request)), dtype=torch.int32, device=device)
    _widen[(triton.cdiv(len(k_wide), _PAGES),)](
        k_cache, v_cache, meta.block_tables, meta.block_tables.stride(0), meta.seq_lens if meta.rows is None else meta.rows,
        meta.query_start_loc, meta.seq_lens, k_wide, v_wide, tables, tables.stride(0), len(tables), min_queries, v_scale,
        SIZE=shape[1], NUMBERS=shape.numel(), LANES=min(_LANES, triton.next_power_of_2(shape.numel())), PAGES=_PAGES,
        REQUESTS=triton.next_power_of_2(max(_REQUESTS, len(tables))), BY_ROW=meta.rows is not None, num_warps=8, **overlap(device),
    )  # fmt: skip
    heads = replace(heads, scale=heads.scale * k_scale, kv_scales=UNSCALED)
    return heads, k_wide, v_wide, replace(meta, block_tables=tables, rows=None)


def _pages(k_cache: Tensor, meta: AttentionMeta, min_queries: int) -> list[int]:
    """Of each request whose pages are wanted, at most so many."""
    size = k_cache.shape[2]
    return [-(-seq_len // size) for start, stop, seq_len in meta.spans or () if stop - start >= min_queries]
