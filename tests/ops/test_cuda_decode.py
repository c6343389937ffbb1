"""Attention of single queries on CUDA, from raw qkv to mixed heads, against norm, rotation, store and attention in float64."""

from __future__ import annotations

import pytest
import torch

from ops.attention import cuda, reference
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.kv.reference import store_kv
from ops.rope.reference import rope

pytestmark = pytest.mark.gpu

BLOCK = cuda.BLOCK_SIZE
HEADS = [(16, 8, 128), (32, 8, 128), (8, 1, 64), (9, 3, 64), (6, 2, 96), (4, 2, 256), (3, 3, 128)]  # query, kv, size
CONTEXTS = [[1], [17], [576], [16, 15, 33, 1, 100], [2000, 3, 64, 65], [5000] * 2, [40] * 70, [90, 200] * 80]


def step(contexts: list[int], num_heads: int, num_kv_heads: int, size: int, *, norm: bool, dtype: torch.dtype):
    """qkv, heads, caches and meta of one query a line; what the cache does not hold is NaN."""
    lines, width = len(contexts), -(-max(contexts) // BLOCK)
    num_blocks = lines * width + 3
    tables = torch.randperm(num_blocks, device="cuda")[: lines * width].view(lines, width).int()
    caches = [torch.randn(num_blocks, num_kv_heads, BLOCK, size, device="cuda", dtype=dtype) for _ in "kv"]
    for line, context in enumerate(contexts):  # the new token's place and all behind it were never written
        block, offset = divmod(context - 1, BLOCK)
        for cache in caches:
            cache[tables[line, block].item(), :, offset:] = float("nan")
    angles = torch.rand(max(contexts) + 1, (size if norm else size // 2) // 2, device="cuda") * 6
    weights = tuple(torch.rand(size, device="cuda", dtype=dtype) + 0.5 for _ in "qk")
    heads = AttentionHeads(
        num_heads, num_kv_heads, size, size**-0.5, torch.cat([angles.cos(), angles.sin()], dim=-1).contiguous(),
        weights if norm else None, 1e-6,
    )  # fmt: skip
    meta = AttentionMeta(
        torch.arange(lines + 1, device="cuda", dtype=torch.int32),
        torch.tensor(contexts, device="cuda", dtype=torch.int32), tables, 1, max(contexts), uniform=True,
    )  # fmt: skip
    qkv = torch.randn(lines, (num_heads + 2 * num_kv_heads) * size, device="cuda", dtype=dtype)
    return qkv, heads, caches, meta


def exact(qkv, heads: AttentionHeads, caches, meta):
    """out, keys and values in float64."""
    q, k, v = (part.double().clone() for part in heads.split(qkv))
    if heads.norms is not None:
        for part, weight in zip((q, k), heads.norms, strict=True):
            part.mul_(torch.rsqrt(part.square().mean(-1, keepdim=True) + heads.norm_eps) * weight.double())
    positions = meta.seq_lens.long() - 1
    rope(q, k, positions, heads.cos_sin, False)
    blocks = meta.block_tables.long().gather(1, positions[:, None] // BLOCK)[:, 0]
    keys, values = (cache.double() for cache in caches)
    store_kv(k, v, keys, values, blocks * BLOCK + positions % BLOCK)
    return reference.paged_attention(q, keys, values, meta, heads.scale), keys, values


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    written = ~wanted.isnan()
    assert torch.equal(written, ~out.isnan())
    return float((out.double() - wanted)[written].norm() / wanted[written].norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [True, False], ids=["normed", "half of each head turns"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_one_kernel_norms_turns_stores_and_attends(shape, norm, dtype):
    for contexts in CONTEXTS:
        qkv, heads, caches, meta = step(contexts, *shape, norm=norm, dtype=dtype)
        wanted, keys, values = exact(qkv, heads, caches, meta)
        out = torch.full((len(contexts), *shape[::2]), float("nan"), device="cuda", dtype=dtype)
        cuda.decode(qkv, heads, *caches, meta, out, fused=True)
        assert error(out, wanted) < 1e-2, contexts[:4]
        assert error(caches[0], keys) < 5e-3, contexts[:4]
        assert error(caches[1], values) == 0, contexts[:4]


def test_beside_prompts_it_takes_single_queries_and_leaves_other_lines_alone():
    qkv, heads, caches, _ = step([100, 50, 30], 16, 8, 128, norm=False, dtype=torch.bfloat16)
    for cache in caches:
        cache.nan_to_num_()
    qkv = torch.randn(5, qkv.shape[1], device="cuda", dtype=torch.bfloat16)
    tables = torch.arange(21, device="cuda", dtype=torch.int32).view(3, 7)
    meta = AttentionMeta(  # line 1 has three queries; rows point at other tables; a padding line at the end
        torch.tensor([0, 1, 4, 5, 5], device="cuda", dtype=torch.int32),
        torch.tensor([100, 50, 30, 0], device="cuda", dtype=torch.int32), tables, 3, 100,
        rows=torch.tensor([2, 0, 1, -1], device="cuda", dtype=torch.int32),
    )  # fmt: skip
    out = torch.full((5, 16, 128), 7.0, device="cuda", dtype=torch.bfloat16)
    cuda.decode(qkv, heads, *caches, meta, out, fused=False)
    q = heads.split(qkv)[0]
    wanted = reference.paged_attention(q.double(), *(cache.double() for cache in caches), meta, heads.scale)
    for token in (0, 4):
        assert error(out[token], wanted[token]) < 1e-2
    assert (out[1:4] == 7.0).all()
