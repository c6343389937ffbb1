"""Attention of rows with one query by decode.cu: from the output of the qkv projection to the heads' results in one kernel.

If every row has one query and earlier steps wrote its context (`meta.uniform`), the kernel also applies norms and rotary embedding
and stores keys and values. In steps with prompts, q and the cache are already complete."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.cuda.program import CompiledKernel, Program
from ops.kv import read_scales
from ops.kv.eight_bits import FP8
from ops.tuning.numbers import DecodeBlock, DecodeTuning

HEAD_SIZES = (64, 96, 128, 256)
BLOCK_SIZE = 16  # keys that a warp processes at a time, and therefore the required cache block size
MAX_GROUP = 8  # query heads per kv head
LOG2E = 1.4426950408889634
NUMBERS = {FP8: "u8", torch.int8: "s8"}  # names in decode.cu of 8-bit cache dtypes; "u16" for 16 bits


def refusal(heads: AttentionHeads, k_cache: Tensor, dtype: torch.dtype) -> str | None:
    """Return why decode.cu cannot compute these heads in `dtype`, or None if it can."""
    if heads.head_size not in HEAD_SIZES:
        return f"head size {heads.head_size} is not one of {HEAD_SIZES}"
    if heads.num_heads // heads.num_kv_heads > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads share a kv head"
    if heads.window is not None or heads.softcap is not None or heads.sinks is not None or heads.alibi is not None:
        return "it supports neither windows nor soft caps nor sinks nor linear biases"
    if heads.norms is not None and heads.norms[0].dtype != dtype:
        return f"it reads norm weights in {dtype} only"
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
    """Compute attention of the rows with one query into out [T, Hq, D]. Tokens of other rows are not written.

    qkv [T, (Hq + 2 Hkv) * D] and the caches are bfloat16 or float16; caches may also be 8-bit (fp8 or int8). `fused`: q and k have
    no norm and rotary embedding yet, and k and v are not stored yet."""
    num_requests = meta.seq_lens.shape[0]
    pairs = num_requests * heads.num_kv_heads
    number = NUMBERS.get(k_cache.dtype, "u16")
    by = tuning.of(qkv.device).attention.decode
    block, splits = choose(pairs, heads.head_size, by, eight_bits=number != "u16")
    q_norm, k_norm = heads.norms or (None, None)
    k_scale, v_scale = read_scales(k_cache, heads.kv_scales)
    _kernel(heads.head_size, block, number, qkv.dtype, qkv.device).launch(
        (splits, heads.num_kv_heads, num_requests), block.warps * 32, 0,
        qkv, qkv.stride(0), q_norm, k_norm, heads.norm_eps, heads.cos_sin, heads.cos_sin.shape[1], int(fused),
        k_cache, v_cache, meta.block_tables, meta.block_tables.stride(0), meta.rows, meta.query_start_loc, meta.seq_lens,
        out, heads.scale * k_scale * LOG2E, heads.num_heads // heads.num_kv_heads, 1 / k_scale, 1 / v_scale, v_scale,
        cluster=splits, early=pairs <= by.max_early_pairs,
    )  # fmt: skip


def choose(pairs: int, head_size: int, by: DecodeTuning, *, eight_bits: bool = False) -> tuple[DecodeBlock, int]:
    """Return (block type, number of blocks per pair of request and KV head).

    With 8-bit caches a warp reads twice as many keys at a time, so that fewer warps idle at a context's end (one H200, fp8, 256
    requests of 576 keys: 92 us with two warps, 105 us with four)."""
    if head_size == 256:
        block = by.head_size_256
    elif eight_bits:
        block = by.narrow_bytes if pairs >= by.min_narrow_pairs else by.wide
    else:
        block = by.narrow if by.min_narrow_pairs <= pairs <= by.max_narrow_pairs else by.wide
    return block, max(1, min(by.max_splits, by.clustered_pairs // pairs))


def program_of(device: torch.device, number: str = "u16") -> Program:
    """Return decode.cu, compiled with the blocks that the tuning may choose. `number`: a value of NUMBERS for 8-bit caches, whose
    kernels are not compiled at start-up."""
    return _program(tuning.of(device).attention.decode, number)


@functools.cache
def _program(by: DecodeTuning, number: str) -> Program:
    instances = {
        _name(size, block): f"DECODE({_name(size, block)}, {size}, {block.warps}, {block.num_blocks}, {number})"
        for size in HEAD_SIZES
        for block in (
            [by.head_size_256] if size == 256 else [by.wide, by.narrow if number == "u16" else by.narrow_bytes]
        )
    }
    return Program([Path(__file__).with_name("decode.cu")], instances, listed=number == "u16")


def _name(head_size: int, block: DecodeBlock) -> str:
    return f"decode_{head_size}_{block.warps}_{block.num_blocks}"


@functools.cache
def _kernel(
    head_size: int, block: DecodeBlock, number: str, dtype: torch.dtype, device: torch.device
) -> CompiledKernel:
    return program_of(device, number).kernel(_name(head_size, block), dtype, device)
