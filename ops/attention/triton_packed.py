"""Attention within a step in Triton: rows of any length, without padding or cache. A query attends to its whole row, or to a window
on both sides. The device reads the lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ops import tuning
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.attention.triton_paged import HIDDEN, LOG2E, NONE_YET, choose_tiles, fold, precision, with_sink
from ops.launch import overlap, wait_for_previous
from ops.rope.triton_qkv import norm_rope_store
from ops.tuning.numbers import QueryTiles, Tuning


@triton.jit
def _scores(
    q, k, query, key, seen, head, bias_ptr, bias_stride, scale_log2,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Scaled for powers of two if capped or biased, else not scaled yet; `seen` [TOKENS, TILE] masks reads
    # of the biases. Queries and keys by their place in the row.
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP > 0:
        inner = scores * (scale_log2 * 0.6931471805599453 * 2.0 / SOFTCAP)
        scores = (SOFTCAP - 2.0 * SOFTCAP / (tl.exp(inner) + 1.0)) * 1.4426950408889634
    if bias_ptr is not None:
        if SOFTCAP == 0:
            scores *= scale_log2
        behind = bias_stride // 2 + key[None, :] - query[:, None]
        bias = tl.load(bias_ptr + head * bias_stride + behind, mask=seen, other=0.0)
        scores += bias * 1.4426950408889634
    return scores


@triton.jit(do_not_specialize=["num_requests", "bias_stride"])
def _packed(
    qkv_ptr, starts_ptr, bias_ptr, sinks_ptr, out_ptr, scale_log2, num_requests, qkv_stride, bias_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, REQUESTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, head, tile of TOKENS queries). The grid is an upper bound: a program finds its request by counting
    # tiles, and those past the last have none.
    program = tl.program_id(0)
    wait_for_previous(PDL)
    each = tl.arange(0, REQUESTS)
    is_request = each < num_requests
    first = tl.load(starts_ptr + each, mask=is_request, other=0)
    length = tl.load(starts_ptr + each + 1, mask=is_request, other=0) - first
    upto = tl.cumsum(tl.cdiv(length, TOKENS) * HEADS, 0)
    request = tl.sum((upto <= program).to(tl.int32), 0)
    if request >= num_requests:
        return
    local = program - tl.max(tl.where(upto <= program, upto, 0), 0)
    start = tl.load(starts_ptr + request)
    length = tl.load(starts_ptr + request + 1) - start
    # Programs that read the same keys are adjacent.
    num_tiles = tl.cdiv(length, TOKENS)
    head = local // num_tiles
    kv_head = head // (HEADS // KV_HEADS)
    low_query = local % num_tiles * TOKENS
    query = low_query + tl.arange(0, TOKENS)
    dim = tl.arange(0, LANES)
    in_head = (dim < HEAD)[None, :]
    row_ptr = qkv_ptr + start.to(tl.int64) * qkv_stride
    is_q = (query < length)[:, None] & in_head
    q = tl.load(row_ptr + query[:, None] * qkv_stride + head * HEAD + dim[None, :], mask=is_q, other=0.0)
    k_ptr = row_ptr + (HEADS + kv_head) * HEAD
    v_ptr = k_ptr + KV_HEADS * HEAD
    best = tl.full((TOKENS,), NONE_YET, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    mixed = tl.zeros((TOKENS, LANES), tl.float32)
    low = 0
    unmasked = length // TILE * TILE  # keys before it are visible to all queries of the tile
    end = length
    if WINDOW > 0:  # all key tiles are masked: most of them are at the window's two edges
        low = tl.maximum(low_query + 1 - WINDOW, 0) // TILE * TILE
        unmasked = low
        end = tl.minimum(length, low_query + TOKENS + WINDOW - 1)
    fold_scale = 1.0
    if SOFTCAP == 0:  # noqa: SIM102 -- a compiler's condition each
        if bias_ptr is None:
            fold_scale = scale_log2  # merged into one multiply-add with the maximum
    for begin in range(low, unmasked, TILE):
        key = begin + tl.arange(0, TILE)
        where = key[:, None] * qkv_stride + dim[None, :]
        if HEAD == LANES:
            k = tl.load(k_ptr + where)
            v = tl.load(v_ptr + where)
        else:
            k = tl.load(k_ptr + where, mask=in_head, other=0.0)
            v = tl.load(v_ptr + where, mask=in_head, other=0.0)
        seen = (query < length)[:, None] & (key < length)[None, :]
        scores = _scores(q, k, query, key, seen, head, bias_ptr, bias_stride, scale_log2, SOFTCAP, PRECISION)
        best, total, mixed = fold(scores, v, best, total, mixed, fold_scale, PRECISION)
    for begin in range(unmasked, end, TILE):
        key = begin + tl.arange(0, TILE)
        loaded = (key < length)[:, None] & in_head
        where = key[:, None] * qkv_stride + dim[None, :]
        k = tl.load(k_ptr + where, mask=loaded, other=0.0)
        v = tl.load(v_ptr + where, mask=loaded, other=0.0)
        seen = (query < length)[:, None] & (key < length)[None, :]
        if WINDOW > 0:
            seen = seen & (key[None, :] > query[:, None] - WINDOW) & (key[None, :] < query[:, None] + WINDOW)
        scores = _scores(q, k, query, key, seen, head, bias_ptr, bias_stride, scale_log2, SOFTCAP, PRECISION)
        best, total, mixed = fold(tl.where(seen, scores, HIDDEN), v, best, total, mixed, fold_scale, PRECISION)
    total = with_sink(total, best, sinks_ptr, head + query * 0, query < length)
    out_at = ((start + query).to(tl.int64) * HEADS + head)[:, None] * HEAD + dim[None, :]
    tl.store(out_ptr + out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_q)


def attend_packed(qkv: Tensor, heads: AttentionHeads, positions: Tensor, meta: AttentionMeta) -> Tensor:
    """Compute `ops.attend_packed` under a full mask. Results of padding tokens are undefined."""
    if heads.alibi is not None:
        raise ValueError("ALiBi requires a causal mask")
    num_tokens, num_requests = qkv.shape[0], meta.query_start_loc.shape[0] - 1
    out = torch.empty((num_tokens, heads.num_heads * heads.head_size), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return out
    if heads.norms is not None or heads.cos_sin.shape[1]:
        norm_rope_store(
            qkv, heads.num_heads, heads.num_kv_heads, heads.head_size, heads.norms, heads.norm_eps, positions, heads.cos_sin
        )  # fmt: skip
    lanes = max(64, triton.next_power_of_2(heads.head_size))
    if (length := _one_length(qkv, heads, meta, lanes)) is not None:
        return _attend_by_torch(qkv, heads, length)
    by, bias = tuning.of(qkv.device), heads.relative_bias
    how = _tiles(qkv.dtype, lanes, num_tokens * heads.num_heads, by, is_biased=bias is not None)
    if meta.spans is None:  # each request has at most one tile that is not full
        num_tiles = num_tokens // how.rows + min(num_requests, num_tokens)
    else:
        num_tiles = sum(triton.cdiv(end - start, how.rows) for start, end, _ in meta.spans)
    _packed[(num_tiles * heads.num_heads,)](
        qkv, meta.query_start_loc, bias, heads.sinks, out, heads.scale * LOG2E, num_requests, qkv.stride(0),
        0 if bias is None else bias.stride(0), HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, HEAD=heads.head_size,
        LANES=lanes, TOKENS=how.rows, TILE=how.keys,
        REQUESTS=128 if num_requests <= 128 else max(1024, triton.next_power_of_2(num_requests)),
        WINDOW=heads.window or 0, SOFTCAP=heads.softcap or 0.0, PRECISION=precision(qkv), num_warps=how.warps,
        num_stages=how.stages, **overlap(qkv.device),
    )  # fmt: skip
    return out


def _one_length(qkv: Tensor, heads: AttentionHeads, meta: AttentionMeta, lanes: int) -> int | None:
    """Return the common length of all rows, if the host knows it and torch's kernel is faster; else None. On an H200, torch takes
    0.24 ms for 4,096 patches of SigLIP (16 heads of 72), and our kernel, which pads heads to 128, 0.52 ms."""
    if not meta.spans or qkv.dtype == torch.float32 or lanes == heads.head_size or heads.head_size < 64:
        return None
    if heads.window or heads.softcap or heads.sinks is not None or heads.relative_bias is not None:
        return None
    lengths = {end - start for start, end, _ in meta.spans}
    length = lengths.pop()
    return length if not lengths and length * len(meta.spans) == len(qkv) else None


def _attend_by_torch(qkv: Tensor, heads: AttentionHeads, length: int) -> Tensor:
    q, k, v = (each.unflatten(0, (-1, length)).transpose(1, 2) for each in heads.split(qkv))
    grouped = heads.num_heads != heads.num_kv_heads
    mixed = scaled_dot_product_attention(q, k, v, scale=heads.scale, enable_gqa=grouped)
    return mixed.transpose(1, 2).reshape(len(qkv), -1)


def _tiles(dtype: torch.dtype, lanes: int, num_rows: int, by: Tuning, *, is_biased: bool) -> QueryTiles:
    ours = by.attention.within_step
    if dtype != torch.float32 and is_biased:
        return ours.biased
    large = ours.full[lanes]
    if dtype != torch.float32 and num_rows >= large.rows * by.multiprocessors:
        return large
    return choose_tiles(dtype, lanes, 0, by.attention.paged, by.multiprocessors)
