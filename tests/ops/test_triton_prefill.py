"""Long fresh prompts through torch's attention, the rest through Triton: together they are the whole step, each token once."""

from __future__ import annotations

import pytest
import torch

from ops.attention import reference, sdpa, triton_paged
from ops.attention.meta import AttentionMeta
from ops.kv.reference import store_kv
from tests.ops.places import places

BLOCK = 16


def step(lines, heads, kv_heads, head_size, dtype, device):
    """A step whose own tokens stand in the cache and in qkv; older context only in the cache."""
    random = torch.Generator().manual_seed(0)
    needed = [-(-context // BLOCK) for _, context in lines]
    tables = torch.zeros(len(lines), max(needed), dtype=torch.int32)
    caches = [torch.randn(sum(needed), kv_heads, BLOCK, head_size, generator=random).to(dtype) for _ in "kv"]
    for line, blocks in enumerate(torch.randperm(sum(needed), generator=random, dtype=torch.int32).split(needed)):
        tables[line, : len(blocks)] = blocks
    starts = torch.tensor([0, *(count for count, _ in lines)]).cumsum(0).tolist()
    qkv = torch.randn(starts[-1], (heads + 2 * kv_heads) * head_size, generator=random).to(dtype)
    _, k, v = qkv.unflatten(1, (-1, head_size)).split([heads, kv_heads, kv_heads], dim=1)
    positions = [torch.arange(context - count, context) for count, context in lines]
    slots = [tables[line][at // BLOCK] * BLOCK + at % BLOCK for line, at in enumerate(positions)]
    store_kv(k, v, *caches, torch.cat(slots).long())
    meta = AttentionMeta(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([context for _, context in lines], dtype=torch.int32, device=device),
        tables.to(device), max(count for count, _ in lines), max(context for _, context in lines),
        spans=tuple((starts[line], starts[line + 1], context) for line, (_, context) in enumerate(lines)),
    )  # fmt: skip
    return qkv.to(device), *(cache.to(device) for cache in caches), meta


@pytest.mark.parametrize(("device", "dtype", "tolerance"), places(1e-5, 2e-3, 1e-2))
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 2, 64), (3, 3, 128), (4, 1, 96)])
def test_the_two_share_a_step(device, dtype, tolerance, heads, kv_heads, head_size):
    lines = [(64, 64), (64, 64), (1, 30), (80, 80), (70, 90), (63, 63), (0, 0), (64, 64)]
    qkv, k_cache, v_cache, meta = step(lines, heads, kv_heads, head_size, dtype, device)
    scale = head_size**-0.5
    q = qkv[:, : heads * head_size].unflatten(1, (heads, head_size))
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    rest = sdpa.prefill_attention(qkv, out, heads, kv_heads, head_size, meta, scale, 64)
    if device == "cpu" or dtype != torch.float32:
        assert rest == [(128, 129, 30), (209, 279, 90), (279, 342, 63)]
        assert out.isnan().any(-1).any(-1).nonzero().flatten().tolist() == [128, *range(209, 342)]
        prefill_from = 64
    else:
        assert rest == [span for span in meta.spans if span[0] < span[1]]
        prefill_from = triton_paged.NEVER
    triton_paged.paged_attention(q, k_cache, v_cache, meta, scale, out=out, prefill_from=prefill_from)
    wanted = reference.paged_attention(q.double(), k_cache.double(), v_cache.double(), meta, scale)
    assert ((out.double() - wanted).norm() / wanted.norm()) < tolerance


def test_without_spans_on_the_host_there_is_no_plan():
    qkv, _, _, meta = step([(3, 3)], 2, 2, 64, torch.float32, "cpu")
    bare = AttentionMeta(meta.query_start_loc, meta.seq_lens, meta.block_tables, 3, 3)
    with pytest.raises(ValueError, match="spans"):
        sdpa.prefill_attention(qkv, qkv.new_empty(3, 2, 64), 2, 2, 64, bare, 0.125, 64)
