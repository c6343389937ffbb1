"""A layer's attention on CUDA, from the qkv projection's output to the mixed heads: which kernel takes which requests.

A step of single queries is one kernel. Else norms, rotation and storing come first, for all tokens; then requests of one query,
long prompts that are whole in the step (planned on the host: in no captured graph) and all other spans each have a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import tuning
from ops.attention import cuda, sdpa, triton_paged
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.cuda import program
from ops.rope.triton_qkv import norm_rope_store

HALVES = (torch.bfloat16, torch.float16)


def attend(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """See `ops.attend`. Padding tokens get anything."""
    out = torch.empty((qkv.shape[0], heads.num_heads, heads.head_size), dtype=qkv.dtype, device=qkv.device)
    own = (
        qkv.dtype in HALVES
        and k_cache.dtype == qkv.dtype
        and program.missing() is None
        and not cuda.refusal(heads, k_cache)
    )
    if own and meta.uniform:
        cuda.decode(qkv, heads, k_cache, v_cache, meta, out, fused=True)
        return out.flatten(1)
    norm_rope_store(
        qkv, heads.num_heads, heads.num_kv_heads, heads.head_size, heads.norms, heads.norm_eps, positions, heads.cos_sin,
        k_cache, v_cache, slot_mapping,
    )  # fmt: skip
    prefill_from = triton_paged.NEVER
    if meta.spans is not None and qkv.dtype in HALVES and not sdpa.refusal(heads):
        prefill_from = tuning.of(qkv.device).attention.min_planned_prefill
        sdpa.prefill_attention(
            qkv, out, heads.num_heads, heads.num_kv_heads, heads.head_size, meta, heads.scale, prefill_from
        )
    has_singles = meta.spans is None or any(end - start == 1 for start, end, _ in meta.spans)
    if own and has_singles:
        cuda.decode(qkv, heads, k_cache, v_cache, meta, out, fused=False)
    q = heads.split(qkv)[0]
    triton_paged.paged_attention(
        q,
        k_cache,
        v_cache,
        meta,
        heads.scale,
        heads.window,
        heads.softcap,
        heads.sinks,
        heads.alibi,
        out=out,
        prefill_from=prefill_from,
        singles=not own,
    )
    return out.flatten(1)
