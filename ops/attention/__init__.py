"""Attention over the paged KV cache: a layer's whole attention between its projections, and softmax(q k^T) v alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ops import backends
from ops import native as cpu
from ops.attention import native, packed_torch, reference, traced
from ops.attention.heads import CAUSAL, FULL, AttentionHeads, LatentHeads, causal_only
from ops.attention.meta import AttentionMeta
from ops.attention.reference import TokenBlock, mix_blocks
from ops.kv import read_scales, store_kv
from ops.kv.eight_bits import FP8
from ops.norm import rms_norm
from ops.registry import USUAL_ATTENTION, Kernel, Op, ShapeClass, capability
from ops.rope import rope


def _on_cpu(case: ShapeClass) -> str | None:
    return cpu.supports_attention(case) or causal_only(case)


def _reads_cache(case: ShapeClass) -> str | None:
    """Return why Triton cannot read an 8-bit cache here, or None if it can."""
    if case.kv_dtype == FP8 and case.capability is not None and case.capability < (8, 9):
        return "fp8 requires compute capability 8.9 or more"
    if case.kv_dtype == torch.int8 and case.head_size % 4:
        return "entries of int8 require head sizes that are multiples of 4"
    return None


def cache_refusal(device: torch.device, kv_dtype: torch.dtype, head_size: int) -> str | None:
    """Return why the Triton kernels cannot read KV caches of this dtype and head size. None if they can, or if `device` is not a
    GPU."""
    if device.type != "cuda":
        return None
    return _reads_cache(ShapeClass(device.type, torch.float32, kv_dtype, head_size, capability=capability(device)))


def _on_cuda(case: ShapeClass) -> str | None:
    return backends.on_cuda(case) or causal_only(case) or _reads_cache(case)


def _latent_on_cuda(case: ShapeClass) -> str | None:
    if case.kv_dtype == torch.int8:
        return "latents are not kept in int8"
    return backends.on_cuda_at_any_size(case) or _reads_cache(case)


_paged_attention = Op(
    "paged_attention",
    USUAL_ATTENTION,
    [
        backends.native("paged_attention", native.paged_attention, _on_cpu),
        backends.triton("paged_attention", "ops.attention.triton_paged:paged_attention", _on_cuda),
        backends.reference("paged_attention", reference.paged_attention),
    ],
)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None, mask: str = CAUSAL,
) -> Tensor:  # fmt: skip
    """Return attention [T, Hq, D] of q [T, Hq, D] over the paged context that `meta` describes.

    k_cache, v_cache [num_blocks, Hkv, block_size, D]. Hq is a multiple of Hkv; query head h reads KV head h // (Hq // Hkv). A query
    attends to the keys that `mask` (ops/attention/heads.py) allows: by default all up to its own position, or the last `window` of
    them.

    If `softcap` is set, scores s = q k^T * scale become softcap * tanh(s / softcap) (Gemma 2, 2024). sinks [Hq] float32: an extra
    score of each head, which takes part in the softmax and contributes no value (GPT-OSS, 2025). alibi [Hq] float32: after any
    softcap, scores of head h are reduced by alibi[h] per token of distance (Press et al. 2021); the native CPU kernel does not
    support it. Values of an fp8 cache are used unscaled: the caller applies the scale of keys to `scale`, and that of values to the
    result."""
    run = _paged_attention.runs[q.device, q.dtype, k_cache.dtype, q.shape[2], (), mask]
    if mask != CAUSAL:  # most kernels have no mask argument
        return run(q, k_cache, v_cache, meta, scale, window, softcap, sinks, alibi, mask)
    if alibi is None:
        return run(q, k_cache, v_cache, meta, scale, window, softcap, sinks)
    return run(q, k_cache, v_cache, meta, scale, window, softcap, sinks, alibi)


def attend(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """Compute a layer's attention between its projections: norms of heads, rotary embedding, KV cache write, softmax(q k^T) v.

    qkv [T, (Hq + 2 Hkv) * D] is overwritten. positions, slot_mapping [T] int64: see `rope` and `store_kv`. Returns [T, Hq * D].
    Every token's key is stored before any query of the step reads it."""
    run = _attend.runs[qkv.device, qkv.dtype, k_cache.dtype, heads.head_size, (), heads.mask]
    return run(qkv, heads, positions, k_cache, v_cache, slot_mapping, meta)


def attend_blocks(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    meta: AttentionMeta, blocks: Sequence[TokenBlock],
) -> Tensor:  # fmt: skip
    """Compute `attend`, but let all tokens of each block in `blocks` attend to each other regardless of the mask."""
    q, k, v = _turned(qkv, heads, positions)
    store_kv(k, v, k_cache, v_cache, slot_mapping, heads.kv_scales)
    k_scale, v_scale = read_scales(k_cache, heads.kv_scales)
    heads = replace(heads, scale=heads.scale * k_scale)
    mixed = paged_attention(q, k_cache, v_cache, meta, heads.scale, heads.window, heads.softcap, heads.sinks)
    mix_blocks(q, k_cache, v_cache, meta, heads, blocks, mixed)
    return mixed.flatten(1) if v_scale == 1 else mixed.flatten(1) * v_scale


def _attend_in_parts(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    q, k, v = _turned(qkv, heads, positions)
    store_kv(k, v, k_cache, v_cache, slot_mapping, heads.kv_scales)
    k_scale, v_scale = read_scales(k_cache, heads.kv_scales)
    mixed = paged_attention(
        q, k_cache, v_cache, meta, heads.scale * k_scale, heads.window, heads.softcap, heads.sinks, heads.alibi, heads.mask
    )  # fmt: skip
    return mixed.flatten(1) if v_scale == 1 else mixed.flatten(1) * v_scale


def _turned(qkv: Tensor, heads: AttentionHeads, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv into q [T, Hq, D], k and v [T, Hkv, D], and apply norms and rotary embedding to q and k."""
    q, k, v = heads.split(qkv)
    if heads.norms is not None:
        q = rms_norm(q, heads.norms[0], heads.norm_eps)
        k = rms_norm(k, heads.norms[1], heads.norm_eps)
    rope(q, k, positions, heads.cos_sin)
    return q, k, v


def attend_packed(qkv: Tensor, heads: AttentionHeads, positions: Tensor, meta: AttentionMeta) -> Tensor:
    """Compute attention without a cache: a query attends to keys of its own row in the step, as far as `heads.mask` allows. All
    tokens of a row must be in the step. Context lengths and block tables of `meta` are not read.

    qkv [T, (Hq + 2 Hkv) * D] is overwritten. Returns [T, Hq * D]."""
    run = _attend_packed.runs[qkv.device, qkv.dtype, None, heads.head_size, (), heads.mask]
    return run(qkv, heads, positions, meta)


def _attend_packed_in_parts(qkv: Tensor, heads: AttentionHeads, positions: Tensor, meta: AttentionMeta) -> Tensor:
    q, k, v = _turned(qkv, heads, positions)
    mixed = reference.packed_attention(
        q, k, v, meta, heads.scale, heads.window, heads.softcap, heads.sinks, heads.alibi, heads.mask,
        heads.relative_bias,
    )  # fmt: skip
    return mixed.flatten(1)


def _attend_packed_by_torch(qkv: Tensor, heads: AttentionHeads, positions: Tensor, meta: AttentionMeta) -> Tensor:
    if not packed_torch.computes(heads):
        return _attend_packed_in_parts(qkv, heads, positions, meta)
    return packed_torch.packed_attention(*_turned(qkv, heads, positions), meta, heads).flatten(1)


def _attend_packed_natively(qkv: Tensor, heads: AttentionHeads, positions: Tensor, meta: AttentionMeta) -> Tensor:
    if heads.relative_bias is not None or heads.alibi is not None:  # not supported by the compiled kernel
        return _attend_packed_by_torch(qkv, heads, positions, meta)
    q, k, v = _turned(qkv, heads, positions)
    return native.packed_attention(q, k, v, meta, heads.scale, heads.window, heads.softcap, heads.sinks).flatten(1)


def _full_only(case: ShapeClass) -> str | None:
    return None if case.mask == FULL else "computes full attention only"


def _full_on_cpu(case: ShapeClass) -> str | None:
    return cpu.supports_attention(case) or _full_only(case)


def _full_on_cuda(case: ShapeClass) -> str | None:
    return backends.on_cuda(case) or _full_only(case)


def attend_latent(
    q: Tensor,
    latent: Tensor,
    heads: LatentHeads,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """Compute latent attention, D = rank + P (see `LatentHeads`): store the step's keys, then attend with every head. Returns [T,
    Hq, rank].

    q [T, Hq, D] and latent [T, D] are contiguous; their last P dims are rotated in place. cache [num_blocks, 1, block_size, D].
    positions, slot_mapping [T] int64: see `rope` and `store_kv`."""
    run = _attend_latent.runs[q.device, q.dtype, cache.dtype, heads.head_size]
    return run(q, latent, heads, positions, cache, slot_mapping, meta)


def _attend_latent_in_parts(
    q: Tensor,
    latent: Tensor,
    heads: LatentHeads,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    keys = latent[:, None]
    rope(q[..., heads.rank :], keys[..., heads.rank :], positions, heads.cos_sin, interleaved=True)
    store_kv(keys, keys, cache, cache, slot_mapping, (heads.kv_scale, heads.kv_scale))
    scale, _ = read_scales(cache, (heads.kv_scale, heads.kv_scale))
    mixed = paged_attention(q, cache, cache, meta, heads.scale * scale)[..., : heads.rank]
    return mixed if scale == 1 else mixed * scale


_attend = Op(
    "attend",
    USUAL_ATTENTION,
    [
        backends.triton("attend", "ops.attention.layer:attend", _on_cuda),
        backends.reference("attend", _attend_in_parts, "one op after another"),
    ],
    backends.traced("attend", traced.attend, _on_cpu),
)
_attend_packed = Op(
    "attend_packed",
    ShapeClass("cpu", torch.float32, None, 64, mask=FULL),
    [
        backends.triton("attend_packed", "ops.attention.triton_packed:attend_packed", _full_on_cuda),
        backends.native("attend_packed", _attend_packed_natively, _full_on_cpu),
        Kernel("attend_packed", "torch", _full_only, _attend_packed_by_torch, "its fused attention, run by run"),
        backends.reference("attend_packed", _attend_packed_in_parts, "one op after another"),
    ],
    backends.traced("attend_packed", traced.attend_packed, _full_on_cpu),
)
_attend_latent = Op(
    "attend_latent",
    USUAL_ATTENTION,
    [
        backends.triton("attend_latent", "ops.attention.triton_latent:attend_latent", _latent_on_cuda),
        backends.reference("attend_latent", _attend_latent_in_parts, "one op after another"),
    ],
)
