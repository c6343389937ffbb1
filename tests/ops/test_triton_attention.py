"""Triton's paged attention against the torch reference in float64: on the CPU by Triton's interpreter, on a GPU for real."""

from __future__ import annotations

import pytest
import torch

from ops.attention import reference, triton_paged
from ops.attention.meta import AttentionMeta
from tests.ops.places import DEVICES, places


def case(device, spans, heads, kv_heads, head_size, dtype, block_size=16, seed=0):
    """`spans`: (query length, context length) by row. Blocks are scattered, and unused cache is poisoned."""
    random = torch.Generator().manual_seed(seed)
    tables_needed = [-(-context // block_size) for _, context in spans]
    num_blocks = sum(tables_needed) + 3
    order = torch.randperm(num_blocks, generator=random).tolist()
    tables = torch.zeros(len(spans), max(*tables_needed, 1), dtype=torch.int32)
    shape = (num_blocks, kv_heads, block_size, head_size)
    k, v = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in "kv")
    for row, (_, context) in enumerate(spans):
        for index in range(tables_needed[row]):
            block = order.pop()
            tables[row, index] = block
            used = min(block_size, context - index * block_size)
            for cache in (k, v):
                cache[block, :, :used] = torch.randn(kv_heads, used, head_size, generator=random, dtype=torch.float64)
    starts = torch.tensor([0, *(query for query, _ in spans)]).cumsum(0)
    q = torch.randn(int(starts[-1]), heads, head_size, generator=random, dtype=torch.float64)
    meta = AttentionMeta(
        starts.int().to(device), torch.tensor([c for _, c in spans], dtype=torch.int32, device=device),
        tables.to(device), max(query for query, _ in spans), max(context for _, context in spans),
    )  # fmt: skip
    q, k, v = (t.to(device=device, dtype=dtype) for t in (q, k, v))
    return q, k, v, meta


@pytest.mark.parametrize(("device", "dtype", "tolerance"), places(1e-5, 2e-3, 1e-2))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(4, 4, 64), (9, 3, 64), (16, 8, 128), (8, 1, 64), (4, 2, 256)]
)
@pytest.mark.parametrize(
    "spans",
    [
        [(1, 1), (1, 70), (1, 300), (1, 16)],
        [(1, 600)],
        [(5, 5), (1, 40), (33, 90), (130, 130)],
        [(17, 300)],
    ],
    ids=["decode", "decode, split", "mixed", "chunk"],
)
def test_matches_the_reference(device, spans, heads, kv_heads, head_size, dtype, tolerance):
    q, k, v, meta = case(device, spans, heads, kv_heads, head_size, dtype)
    wanted = reference.paged_attention(q.double(), k.double(), v.double(), meta, head_size**-0.5)
    got = triton_paged.paged_attention(q, k, v, meta, head_size**-0.5).double()
    assert got.isfinite().all()
    assert ((got - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_of_a_graph_get_zeros_and_harm_nobody(device):
    q, k, v, meta = case(device, [(1, 33), (1, 20)], 4, 2, 64, torch.float32)
    padded = AttentionMeta(
        torch.arange(4, dtype=torch.int32, device=device),
        torch.cat([meta.context_lens, meta.context_lens.new_zeros(1)]),
        torch.cat([meta.block_tables, meta.block_tables.new_zeros(1, meta.block_tables.shape[1])]),
        1,
        meta.max_context_len,
    )
    q = torch.cat([q, q[:1]])
    got = triton_paged.paged_attention(q, k, v, padded, 0.125)
    torch.testing.assert_close(got[:2], triton_paged.paged_attention(q[:2], k, v, meta, 0.125))
    assert not got[2].any()
