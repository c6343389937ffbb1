"""Attention of single queries by decode.cu: from the qkv projection's output to the mixed heads in one kernel.

Where every line has one query whose context was written by earlier steps (`meta.uniform`), it norms, rotates and stores as
well; beside prompts it takes q and a cache that are already complete."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.cuda.program import Kernel, Program

HEAD_SIZES = (64, 96, 128, 256)
BLOCK_SIZE = 16  # keys that one warp takes at a time, so what a block of the cache must hold
MAX_GROUP = 8  # query heads of one kv head
LOG2E = 1.4426950408889634

# Warps of a block, and how many blocks the registers of a multiprocessor must hold. Measured on an H200 by pairs of line and kv
# head, contexts of 576 keys and mixed ones of 100 to 2048 with the longest first: wide blocks even out long contexts, narrow
# ones are quicker where pairs fill the device twice or three times; few pairs get a cluster of blocks each.
_WIDE, _NARROW, _LARGE = (8, 2), (4, 4), (4, 2)
_NARROW_PAIRS = range(1000, 1600)
_CLUSTERED_PAIRS, _MOST_SPLITS = 200, 8

_PROGRAM = Program(
    [Path(__file__).with_name("decode.cu")],
    {
        f"decode_{size}_{warps}": f"DECODE(decode_{size}_{warps}, {size}, {warps}, {blocks})"
        for size in HEAD_SIZES
        for warps, blocks in ([_LARGE] if size == 256 else [_WIDE, _NARROW])
    },
)


def refusal(heads: AttentionHeads, k_cache: Tensor) -> str | None:
    """Why these heads cannot be served, None if they can."""
    if heads.head_size not in HEAD_SIZES:
        return f"head size {heads.head_size} is not one of {HEAD_SIZES}"
    if heads.num_heads // heads.num_kv_heads > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads share a kv head"
    if heads.window is not None or heads.softcap is not None or heads.sinks is not None:
        return "it knows neither windows nor soft caps nor sinks"
    if heads.norms is not None and heads.norms[0].dtype != k_cache.dtype:
        return f"it reads norm weights in {k_cache.dtype} only"
    if k_cache.shape[2] != BLOCK_SIZE:
        return f"blocks of {k_cache.shape[2]} keys are not blocks of {BLOCK_SIZE}"
    return None


def decode(
    qkv: Tensor,
    heads: AttentionHeads,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    out: Tensor,
    *,
    fused: bool,
) -> None:
    """Writes the lines of one query into out [T, Hq, D]; the others' tokens are left alone.

    qkv [T, (Hq + 2 Hkv) * D] bfloat16 or float16, as are the caches. `fused`: q and k are raw, k and v not yet stored."""
    num_lines = meta.context_lens.shape[0]
    pairs = num_lines * heads.num_kv_heads
    warps, _ = _LARGE if heads.head_size == 256 else _NARROW if pairs in _NARROW_PAIRS else _WIDE
    splits = max(1, min(_MOST_SPLITS, _CLUSTERED_PAIRS // pairs))
    q_norm, k_norm = heads.norms or (None, None)
    _kernel(heads.head_size, warps, qkv.dtype, qkv.device).launch(
        (splits, heads.num_kv_heads, num_lines), warps * 32, 0,
        qkv, qkv.stride(0), q_norm, k_norm, heads.norm_eps, heads.cos_sin, heads.cos_sin.shape[1], int(fused),
        k_cache, v_cache, meta.block_tables, meta.block_tables.stride(0), meta.rows, meta.query_starts, meta.context_lens,
        out, heads.scale * LOG2E, heads.num_heads // heads.num_kv_heads, cluster=splits,
    )  # fmt: skip


@functools.cache
def _kernel(head_size: int, warps: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    return _PROGRAM.kernel(f"decode_{head_size}_{warps}", dtype, device)
