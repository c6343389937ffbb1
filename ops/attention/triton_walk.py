"""Common parts of kernels over a paged cache: addresses of keys, the running softmax, a context split over programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention.stand_in import num_elements
from ops.launch import wait_for_previous
from ops.tuning.numbers import Tuning

LOG2E = 1.4426950408889634  # exp2 is one instruction on the device, exp two
HIDDEN = tl.constexpr(-1e30)  # the score of a key that is not seen
# The largest score of a row that has seen none. Were it HIDDEN too, a hidden key's weight would be 2 to the difference of two
# equal, enormous numbers, one of them not rounded: infinity as soon as a multiply-add is fused.
NONE_YET = tl.constexpr(-1e20)


@triton.jit
def keys_at(
    table_ptr, begin, context, kv_head, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Where keys begin .. begin + TILE (begin a multiple of TILE) lie in a cache [blocks, KV_HEADS, BLOCK, HEAD], in elements.
    each = tl.arange(0, TILE)
    key = begin + each
    if TILE % BLOCK == 0:  # then only `begin` changes from tile to tile
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
    if scales_ptr is not None:  # entries begin at any word of four bytes, which Triton 3.6 takes for any of sixteen
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
    # The softmax's sums [rows], taken against `best` in base 2, with each row's sink among the scores.
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
        context -= tl.maximum(context - WINDOW, 0) // TILE * TILE  # those that were mixed
    span = split_span(context, num_splits, TILE)
    if (tl.load(starts_ptr + request + 1) - token != 1) | (span >= context):
        return  # not a single query, or `_decode` needed one split and wrote the result itself
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
    """Float32 means float32: tf32 would differ from every reference in the third digit."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def is_wide(cache: Tensor) -> bool:
    """Offsets into the cache take 64 bits, and twice the instructions, only where they must."""
    return num_elements(cache) >= 2**31


def num_splits_for(num_programs: int, max_context: int, min_keys: int, by: Tuning) -> int:
    """A power of two: as many programs a multiprocessor as `by` says where the batch does not give them, `min_keys` keys a
    split."""
    wanted = by.attention.programs_per_multiprocessor * by.multiprocessors // max(1, num_programs)
    most = triton.next_power_of_2(triton.cdiv(max_context, min_keys))
    return max(1, min(1 << max(0, wanted.bit_length() - 1), most, by.attention.max_splits))
