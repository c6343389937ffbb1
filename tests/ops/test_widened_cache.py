"""Pages of fp8 that long rows see, widened and put side by side: whose they are, and what stands in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ops.attention import layer, triton_widened
from ops.attention.heads import AttentionHeads
from ops.kv.eight_bits import to_fp8
from tests.ops import test_triton_attention as paged
from tests.ops.places import DEVICES

SPANS = [(5, 5), (1, 40), (17, 200), (3, 64), (0, 0), (37, 37)]  # queries and context; 1, 3, 13, 4, 0 and 3 pages


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(
    ("max_pages", "first_pages"),
    [(20, [0, -1, 1, -1, -1, 14]), (17, [0, -1, 1, -1, -1, 14]), (16, [0, -1, 1, -1, -1, -1]), (1, [0, *[-1] * 5])],
)
def test_pages_of_long_rows_stand_side_by_side(device, by_row, max_pages, first_pages):
    _, k, v, meta = paged.case(device, SPANS, 4, 2, 48, torch.float32)
    rows = meta.rows
    if not by_row:
        meta = replace(meta, block_tables=meta.block_tables[rows.clamp(min=0).long()], rows=None)
    caches = [to_fp8(cache.nan_to_num(), 1.0) for cache in (k, v)]
    keys, values, firsts = triton_widened.widen(*caches, meta, torch.float16, 4, max_pages, 3)
    assert len(keys) == len(values) == max_pages
    assert firsts.tolist() == first_pages
    for request, (first, (_, context)) in enumerate(zip(first_pages, SPANS, strict=True)):
        if first < 0:
            continue
        count = -(-context // 16)
        blocks = meta.block_tables[int(rows[request]) if by_row else request, :count].long()
        for wide, cache in zip((keys, values), caches, strict=True):
            assert torch.equal(wide[first : first + count], cache[blocks].half())


def test_what_is_widened_before_follows_from_shapes():
    """A captured step has no more to go by."""
    _, k, v, meta = paged.case("cpu", [(8, 8)], 4, 2, 64, torch.bfloat16)
    caches = [to_fp8(cache.nan_to_num(), 1.0) for cache in (k, v)]
    by = layer.tuning.of(k.device).attention
    heads = AttentionHeads(4, 2, 64, 0.125, torch.empty(10, 0))
    qkv = torch.empty(by.min_widened_queries, 512, dtype=torch.bfloat16)
    assert layer._widened(qkv[:-1], heads, *caches, meta) is None
    assert layer._widened(qkv, heads, k, v, meta) is None
    assert layer._widened(qkv, replace(heads, window=100), *caches, meta) is None
    assert layer._max_widened_pages(qkv, caches[0], replace(meta, max_seq_len=1000)) == 63
    assert layer._max_widened_pages(qkv, caches[0], replace(meta, max_seq_len=2**30)) == by.max_widened_bytes // (
        4 * 2048
    )
