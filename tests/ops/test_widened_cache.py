"""Pages of fp8 that prompts see, widened and put side by side: what stands in them, and what attention makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ops.attention import layer, prefill, reference, triton_widened
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.kv.fp8_numbers import FP8, to_fp8
from tests.ops import test_triton_attention as paged
from tests.ops.places import DEVICES

SPANS = [(5, 5), (1, 40), (17, 200), (3, 64), (0, 0), (37, 37)]
MIN_QUERIES, MOST = 4, 1 << 20


def step(device: str, by_row: bool) -> tuple[AttentionHeads, torch.Tensor, torch.Tensor, AttentionMeta]:
    _, k, v, meta = paged.case(device, SPANS, 4, 2, 32, torch.float32)
    starts = meta.query_start_loc.tolist()
    spans = tuple((start, stop, context) for start, stop, (_, context) in zip(starts, starts[1:], SPANS, strict=False))
    if not by_row:
        meta = replace(meta, block_tables=meta.block_tables[meta.rows.clamp(min=0).long()], rows=None)
    heads = AttentionHeads(4, 2, 32, 0.25, torch.empty(300, 0, device=device), kv_scales=(0.5, 1.5))
    return heads, to_fp8(k.nan_to_num(), 1.0), to_fp8(v.nan_to_num(), 1.0), replace(meta, spans=spans)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_row", [True, False])
def test_pages_of_prompts_stand_side_by_side(by_row, device):
    heads, k_cache, v_cache, meta = step(device, by_row)
    assert triton_widened.fits(k_cache, meta, MIN_QUERIES, MOST)
    wide_heads, k_wide, v_wide, wide_meta = triton_widened.widened(
        heads, k_cache, v_cache, meta, MIN_QUERIES, torch.float32
    )
    assert len(k_wide) == len(v_wide) == 1 + 13 + 3
    assert wide_heads.scale == heads.scale * 0.5
    seen = []
    for request, (queries, context) in enumerate(SPANS):
        if queries < MIN_QUERIES:
            continue
        pages = wide_meta.block_tables[request, : -(-context // 16)].long()
        row = int(meta.rows[request]) if by_row else request
        blocks = meta.block_tables[row, : len(pages)].long()
        assert torch.equal(k_wide[pages], k_cache[blocks].float())
        assert torch.equal(v_wide[pages], v_cache[blocks].float() * 1.5)
        seen += pages.tolist()
    assert sorted(seen) == list(range(17))


def test_what_is_not_known_or_too_much_is_not_widened():
    _, k_cache, _, meta = step("cpu", True)
    assert not triton_widened.fits(k_cache, replace(meta, spans=None), MIN_QUERIES, MOST)
    assert not triton_widened.fits(k_cache, meta, 38, MOST)
    many = MOST // (4 * k_cache[0].numel()) * 16
    assert triton_widened.fits(k_cache, replace(meta, spans=((0, 4, many),)), MIN_QUERIES, MOST)
    assert not triton_widened.fits(k_cache, replace(meta, spans=((0, 4, many + 1),)), MIN_QUERIES, MOST)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_prompts_over_fp8(dtype, captured):
    spans = [(300, 1000), (64, 64), (1, 40), (20, 20), (129, 129)]
    _, k, v, meta = paged.case("cuda", spans, 8, 2, 128, dtype)
    caches = [to_fp8(cache.nan_to_num(), 1.0) for cache in (k, v)]
    starts, rows = meta.query_start_loc.tolist(), meta.rows.tolist()
    known = tuple((start, stop, context) for start, stop, (_, context) in zip(starts, starts[1:], spans, strict=False))
    meta = replace(meta, spans=None if captured else known)
    places = [
        (row, at) for row, (count, context) in zip(rows, spans, strict=False) for at in range(context - count, context)
    ]
    positions = torch.tensor([at for _, at in places], device="cuda")
    tables = meta.block_tables.cpu()
    slots = torch.tensor([int(tables[row, at // 16]) * 16 + at % 16 for row, at in places], device="cuda")
    heads = AttentionHeads(8, 2, 128, 128**-0.5, torch.empty(1001, 0, device="cuda"), kv_scales=(0.5, 1.5))
    qkv = torch.randn(len(places), 12 * 128, device="cuda", dtype=dtype)
    assert prefill.refusal(heads, caches[0], dtype, meta) is None
    out = layer.attend(qkv, heads, positions, *caches, slots, meta)
    assert caches[0].dtype == FP8
    q = heads.split(qkv)[0].double()
    wanted = reference.paged_attention(q, *(cache.double() for cache in caches), meta, heads.scale * 0.5) * 1.5
    assert (out.double().view_as(wanted) - wanted).norm() / wanted.norm() < 1e-2
