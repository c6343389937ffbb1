"""Norms of q and k heads, rotary embedding and KV cache writes in one Triton pass, between the qkv projection and attention.

Memory-bound, so each head is read once and written once: if there is a cache, attention reads k and v there. A normed head
is rounded to the model's dtype before it is rotated, as the separate ops would round it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.kv.eight_bits import UNSCALED, scales_of
from ops.kv.triton_entries import as_stored, int8_numbers, int8_scale
from ops.launch import overlap, wait_for_previous


@triton.jit
def _store(
    at, a, b, c, in_half, in_rest,
    HEAD: tl.constexpr, HALF: tl.constexpr, HALF_LANES: tl.constexpr, REST_LANES: tl.constexpr,
):  # fmt: skip
    # The three parts of heads that begin at `at` [heads, 1].
    half = tl.arange(0, HALF_LANES)[None, :]
    tl.store(at + half, a.to(at.dtype.element_ty), mask=in_half)
    tl.store(at + HALF + half, b.to(at.dtype.element_ty), mask=in_half)
    if 2 * HALF < HEAD:
        tl.store(at + 2 * HALF + tl.arange(0, REST_LANES)[None, :], c.to(at.dtype.element_ty), mask=in_rest)


@triton.jit
def _store_entries(
    cache_ptr, scales_ptr, at, a, b, c, is_head, in_half, in_rest, per_scale,
    HEAD: tl.constexpr, HALF: tl.constexpr, HALF_LANES: tl.constexpr, REST_LANES: tl.constexpr,
):  # fmt: skip
    # The same into a cache, where entries begin at `at` [heads], in elements; lanes outside of the pieces are zeros.
    if scales_ptr is None:
        a = as_stored(a, cache_ptr, per_scale)
        b = as_stored(b, cache_ptr, per_scale)
        c = as_stored(c, cache_ptr, per_scale)
    else:
        a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        broken = tl.sum(a - a, 1) + tl.sum(b - b, 1) + tl.sum(c - c, 1)  # NaN if there is a NaN or infinity
        scale = int8_scale(tl.maximum(largest, tl.max(tl.abs(c), 1)), broken)
        tl.store(scales_ptr + (at + HEAD) // 4, scale, mask=is_head)
        a, b, c = int8_numbers(a, scale[:, None]), int8_numbers(b, scale[:, None]), int8_numbers(c, scale[:, None])
    _store(cache_ptr + at[:, None], a, b, c, in_half, in_rest, HEAD, HALF, HALF_LANES, REST_LANES)


@triton.jit
def _norm_rope_store(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr,
    per_k_scale, per_v_scale, slot_mapping_ptr, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ENTRY: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_LANES: tl.constexpr, REST_LANES: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (token, PART heads of one kind): first q's programs, then k's, then, where there is a cache, v's. A head is
    # three pieces: dims [0, HALF) and [HALF, 2 * HALF), which rotate together, and the rest, which do not. The *_LANES are powers
    # of two.
    token = tl.program_id(0).to(tl.int64)
    Q_PARTS: tl.constexpr = (HEADS + PART - 1) // PART
    KV_PARTS: tl.constexpr = (KV_HEADS + PART - 1) // PART
    part = tl.program_id(1)
    is_q = part < Q_PARTS
    is_v = part >= Q_PARTS + KV_PARTS
    first_head = (part - tl.where(is_q, 0, tl.where(is_v, Q_PARTS + KV_PARTS, Q_PARTS))) * PART
    head = first_head + tl.arange(0, PART)
    is_head = head < tl.where(is_q, HEADS, KV_HEADS)
    column = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS)) + head
    half = tl.arange(0, HALF_LANES)
    rest = 2 * HALF + tl.arange(0, REST_LANES)
    in_half = is_head[:, None] & (half < HALF)[None, :]
    in_rest = is_head[:, None] & (rest < HEAD)[None, :]
    at = qkv_ptr + token * qkv_stride + (column * HEAD)[:, None]
    wait_for_previous(PDL)
    if k_cache_ptr is not None:
        slot = tl.load(slot_mapping_ptr + token)
        cached = ((slot // BLOCK * KV_HEADS + head) * BLOCK + slot % BLOCK) * ENTRY
    a = tl.load(at + half[None, :], mask=in_half, other=0.0)
    b = tl.load(at + HALF + half[None, :], mask=in_half, other=0.0)
    c = tl.load(at + rest[None, :], mask=in_rest, other=0.0)  # no lane is inside when the whole head rotates
    if k_cache_ptr is not None:  # noqa: SIM102 -- the compiler's condition, and the kernel's
        if is_v:
            if slot >= 0:
                _store_entries(
                    v_cache_ptr, v_scales_ptr, cached, a, b, c, is_head, in_half, in_rest, per_v_scale, HEAD, HALF, HALF_LANES,
                    REST_LANES,
                )  # fmt: skip
            return
    dtype = qkv_ptr.dtype.element_ty
    if q_norm_ptr is not None:
        norm_ptr = k_norm_ptr
        if is_q:
            norm_ptr = q_norm_ptr
        a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / HEAD + eps)[:, None]
        a = (a * scale * tl.load(norm_ptr + half, mask=half < HALF).to(tl.float32)[None, :]).to(dtype)
        b = (b * scale * tl.load(norm_ptr + HALF + half, mask=half < HALF).to(tl.float32)[None, :]).to(dtype)
        c = (c * scale * tl.load(norm_ptr + rest, mask=rest < HEAD).to(tl.float32)[None, :]).to(dtype)
    angle = cos_sin_ptr + tl.load(positions_ptr + token) * 2 * HALF
    cos = tl.load(angle + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF + half, mask=half < HALF, other=0.0)[None, :]
    x, y = a.to(tl.float32), b.to(tl.float32)
    a, b = (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)
    if k_cache_ptr is not None:  # noqa: SIM102
        if not is_q:
            if slot >= 0:
                _store_entries(
                    k_cache_ptr, k_scales_ptr, cached, a, b, c, is_head, in_half, in_rest, per_k_scale, HEAD, HALF, HALF_LANES,
                    REST_LANES,
                )  # fmt: skip
            return
    _store(at, a, b, c, in_half, in_rest, HEAD, HALF, HALF_LANES, REST_LANES)


def norm_rope_store(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    kv_scales: tuple[float, float] = UNSCALED,
) -> None:
    """Norm q and k of qkv [T, (num_heads + 2 * num_kv_heads) * head_size] by `norms` (weights [head_size] of q and of k), if
    given, and rotate them in place. With caches, k and v are written there and unchanged in qkv. Rows of qkv are contiguous.

    positions [T] int64; cos_sin [max_pos, D_rot] float32 as in `ops.rope`, halves (not interleaved), D_rot 0 for no
    rotation; caches [num_blocks, num_kv_heads, block_size, head_size], of any dtype of `ops.store_kv`, and `kv_scales` as
    there; slot_mapping [T] int64, -1 stores nothing."""
    num_tokens = qkv.shape[0]
    if not num_tokens:
        return
    half = cos_sin.shape[1] // 2
    part = max(4, min(16, triton.next_power_of_2(num_kv_heads)))
    lanes = triton.next_power_of_2(max(1, half))
    rest_lanes = triton.next_power_of_2(max(1, head_size - 2 * half))
    q_norm, k_norm = norms if norms is not None else (None, None)
    num_warps = max(1, min(8, part * max(lanes, rest_lanes // 2) // 256))
    kinds = 1 if k_cache is None else 2  # kinds of kv heads to process
    scales = (None, None) if k_cache is None or v_cache is None else (scales_of(k_cache), scales_of(v_cache))
    grid = (num_tokens, triton.cdiv(num_heads, part) + kinds * triton.cdiv(num_kv_heads, part))
    _norm_rope_store[grid](
        qkv, q_norm, k_norm, eps, positions, cos_sin, k_cache, v_cache, *scales, 1 / kv_scales[0], 1 / kv_scales[1], slot_mapping,
        qkv.stride(0), HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD=head_size,
        ENTRY=head_size if k_cache is None else k_cache.shape[3], BLOCK=1 if k_cache is None else k_cache.shape[2], HALF=half,
        HALF_LANES=lanes, REST_LANES=rest_lanes, PART=part, num_warps=num_warps, **overlap(qkv.device),
    )  # fmt: skip
