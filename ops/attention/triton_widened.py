"""Conversion of an fp8 cache to 16 bits for long prompts, during one layer. Each page is converted once, whereas prefill.cu would
convert it for every tile of queries and every head.

The device decides which pages are converted and whether they fit, so a captured graph can contain it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention.meta import AttentionMeta
from ops.launch import overlap, wait_for_previous

_LANES = 4096
PROGRAMS = 4  # per multiprocessor
_REQUESTS = 2048  # maximum of prefill.cu; one kernel for all counts, compiled before steps are captured


class Widened(NamedTuple):
    """Keys and values [pages, Hkv, 16, D] of an fp8 cache in 16 bits, without their scales. first_pages [R] int32: first page of
    each row, negative if the row's pages are not converted."""

    keys: Tensor
    values: Tensor
    first_pages: Tensor


@triton.jit(do_not_specialize=["table_stride", "num_requests", "min_queries", "max_pages"])
def _widen(
    k_ptr, v_ptr, tables_ptr, table_stride, rows_ptr, starts_ptr, lens_ptr, k_out_ptr, v_out_ptr, first_pages_ptr, num_requests,
    min_queries, max_pages,
    SIZE: tl.constexpr, NUMBERS: tl.constexpr, LANES: tl.constexpr, REQUESTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Pages of NUMBERS numbers, SIZE keys each, of requests of at least min_queries queries -> contiguous pages, by request.
    wait_for_previous(PDL)
    program = tl.program_id(0)
    each = tl.arange(0, REQUESTS)
    inside = each < num_requests
    queries = tl.load(starts_ptr + each + 1, mask=inside, other=0) - tl.load(starts_ptr + each, mask=inside, other=0)
    pages = tl.cdiv(tl.load(lens_ptr + each, mask=inside, other=0), SIZE)
    pages = tl.where(inside & (queries >= min_queries), pages, 0)
    ends = tl.cumsum(pages, 0)
    taken = (pages > 0) & (ends <= max_pages)
    if program == 0:
        tl.store(first_pages_ptr + each, tl.where(taken, ends - pages, -1), mask=inside)
    PIECES: tl.constexpr = (NUMBERS + LANES - 1) // LANES
    for item in range(program, tl.sum(tl.where(taken, pages, 0), 0) * PIECES, tl.num_programs(0)):
        target = item // PIECES
        request = tl.sum((ends <= target).to(tl.int32), 0)
        page = target - tl.sum(tl.where(each < request, pages, 0), 0)
        row = request
        if rows_ptr is not None:
            row = tl.maximum(tl.load(rows_ptr + request), 0)
        source = tl.load(tables_ptr + row.to(tl.int64) * table_stride + page).to(tl.int64) * NUMBERS
        lane = item % PIECES * LANES + tl.arange(0, LANES)
        there = lane < NUMBERS
        k = tl.load(k_ptr + source + lane, mask=there, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + source + lane, mask=there, other=0.0).to(tl.float32)
        tl.store(k_out_ptr + target * NUMBERS + lane, k.to(k_out_ptr.dtype.element_ty), mask=there)
        tl.store(v_out_ptr + target * NUMBERS + lane, v.to(v_out_ptr.dtype.element_ty), mask=there)


def widen(
    k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, dtype: torch.dtype, min_queries: int, max_pages: int,
    num_programs: int,
) -> Widened:  # fmt: skip
    """Convert the fp8 caches [num_blocks, Hkv, 16, D] of rows with at least `min_queries` queries to 16 bits, as many as fit in
    `max_pages` pages. `dtype` must represent all fp8 numbers. At most 2048 rows."""
    shape, device, num_requests = k_cache.shape[1:], k_cache.device, meta.seq_lens.shape[0]
    keys, values = (torch.empty((max_pages, *shape), dtype=dtype, device=device) for _ in "kv")
    first_pages = torch.empty(num_requests, dtype=torch.int32, device=device)
    _widen[(num_programs,)](
        k_cache, v_cache, meta.block_tables, meta.block_tables.stride(0), meta.rows, meta.query_start_loc, meta.seq_lens, keys,
        values, first_pages, num_requests, min_queries, max_pages, SIZE=shape[1], NUMBERS=shape.numel(),
        LANES=min(_LANES, triton.next_power_of_2(shape.numel())), REQUESTS=_REQUESTS, num_warps=8, **overlap(device),
    )  # fmt: skip
    return Widened(keys, values, first_pages)
