"""Attention of rows of many queries on Hopper against the reference in float64; what was never written is NaN."""

from __future__ import annotations

import pytest
import torch

from ops.attention import prefill, reference, triton_widened
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.kv import read_scales
from ops.kv.eight_bits import FP8, to_fp8

pytestmark = pytest.mark.gpu

BLOCK = prefill.PAGE
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [
    (16, 8, 128), (32, 8, 128), (8, 1, 64), (9, 3, 64), (6, 2, 96), (4, 2, 256), (3, 3, 128), (4, 1, 80), (2, 2, 32), (2, 1, 192),
]  # fmt: skip
ROWS = [  # (queries, context)
    [(2, 2)],
    [(128, 128)],
    [(129, 129), (127, 127)],
    [(1, 40), (300, 300), (1, 7), (64, 1000), (0, 0), (2, 515)],
    [(500, 517)] * 3,
    [(1500, 1500), (1033, 4001)],
    [(17, 17)] * 150 + [(1, 5)] * 300 + [(2, 33)] * 100,
]


def step(rows, num_heads, num_kv_heads, size, dtype, kept=None, **limits):
    """qkv with q only, heads, caches and meta; what belongs to no context is NaN, in the cache and behind the heads. `kept`: the
    caches' type, by default `dtype`."""
    random = torch.Generator("cuda").manual_seed(0)
    needed = [-(-context // BLOCK) for _, context in rows]
    num_blocks = sum(needed) + 2
    caches = [
        torch.randn(num_blocks, num_kv_heads, BLOCK, size, device="cuda", dtype=dtype, generator=random) for _ in "kv"
    ]
    order = torch.randperm(num_blocks, generator=random, device="cuda").int()
    tables = torch.full((len(rows), max(needed)), 2**30, dtype=torch.int32, device="cuda")
    used = 0
    for row, ((_, context), count) in enumerate(zip(rows, needed, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        if context % BLOCK:
            for cache in caches:
                cache[tables[row, count - 1].item(), :, context % BLOCK :] = float("nan")
    for cache in caches:
        cache[order[used:].long()] = float("nan")
    caches = [to_fp8(cache, 1.0) if kept == FP8 else cache for cache in caches]
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).tolist()
    qkv = torch.randn(starts[-1], (num_heads + 2 * num_kv_heads) * size, device="cuda", dtype=dtype, generator=random)
    qkv[:, num_heads * size :] = float("nan")
    heads = AttentionHeads(num_heads, num_kv_heads, size, size**-0.5, torch.empty(1, 0, device="cuda"), **limits)
    meta = AttentionMeta(
        torch.tensor(starts, dtype=torch.int32, device="cuda"),
        torch.tensor([context for _, context in rows], dtype=torch.int32, device="cuda"),
        tables, max(queries for queries, _ in rows), max(context for _, context in rows),
    )  # fmt: skip
    return qkv, heads, caches, meta


def check(rows, num_heads, num_kv_heads, size, dtype, min_queries=2, widened=None, **limits):
    """`widened`: what is widened before of a cache of fp8, from how many queries of a row on, and how many pages."""
    qkv, heads, (k_cache, v_cache), meta = step(rows, num_heads, num_kv_heads, size, dtype, **limits)
    out = torch.full((qkv.shape[0], num_heads, size), torch.nan, dtype=dtype, device="cuda")
    for _ in range(2):  # the second launch finds its list as the first one left it
        out.fill_(torch.nan)
        before = None if widened is None else triton_widened.widen(k_cache, v_cache, meta, dtype, *widened, 500)
        prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, min_queries, before)
    q = heads.split(qkv)[0]
    k_scale, v_scale = read_scales(k_cache, heads.kv_scales)
    wanted = v_scale * reference.paged_attention(
        q.double(), k_cache.double(), v_cache.double(), meta, heads.scale * k_scale, heads.window, heads.softcap, heads.sinks
    )  # fmt: skip
    ours = torch.tensor([queries >= min_queries for queries, _ in rows for _ in range(queries)], device="cuda")
    assert out[~ours].isnan().all()
    assert not out[ours].isnan().any()
    error = (out[ours].double() - wanted[ours]).norm() / wanted[ours].norm()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_many_queries(shape, rows):
    check(rows, *shape, torch.bfloat16)


@pytest.mark.parametrize("shape", [(16, 8, 128), (9, 3, 64), (4, 2, 256)], ids=str)
def test_float16(shape):
    check(ROWS[3], *shape, torch.float16)
    check(ROWS[5], *shape, torch.float16)


@pytest.mark.parametrize(
    "limits", [{"window": 1}, {"window": 100}, {"window": 128}, {"window": 700}, {"softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("shape", [(8, 4, 128), (9, 3, 64), (4, 2, 256)], ids=str)
def test_limits_of_what_a_query_sees(shape, limits):
    check(ROWS[3], *shape, torch.bfloat16, **limits)
    check(ROWS[5], *shape, torch.bfloat16, **limits)


def test_sinks_with_a_window():
    sinks = torch.randn(8, device="cuda")
    check(ROWS[3], 8, 2, 64, torch.bfloat16, sinks=sinks)
    check(ROWS[5], 8, 2, 64, torch.bfloat16, sinks=sinks, window=128)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 128), (9, 3, 64), (4, 2, 256), (4, 1, 80), (2, 1, 192)], ids=str)
def test_caches_of_fp8(shape, rows):
    check(rows, *shape, torch.bfloat16, kept=FP8, kv_scales=(0.5, 1.7))


@pytest.mark.parametrize("limits", [{"window": 1}, {"window": 100}, {"window": 700}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_limits_and_float16_of_caches_of_fp8(dtype, limits):
    for shape in ((8, 4, 128), (9, 3, 64), (4, 2, 256)):
        check(ROWS[3], *shape, dtype, kept=FP8, **limits)
        check(ROWS[5], *shape, dtype, kept=FP8, **limits)


@pytest.mark.parametrize("rows", ROWS[1:], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 128), (9, 3, 64), (4, 2, 256), (4, 1, 80)], ids=str)
@pytest.mark.parametrize("max_pages", [1000, 100, 8])
def test_caches_of_fp8_of_which_some_is_widened_before(max_pages, shape, rows):
    check(rows, *shape, torch.bfloat16, kept=FP8, kv_scales=(0.5, 1.7), widened=(100, max_pages))


def test_a_captured_launch_widens_what_other_lengths_see():
    qkv, heads, (k_cache, v_cache), meta = step([(300, 300), (40, 90)], 4, 2, 128, torch.float16, kept=FP8)
    out = qkv.new_full((340, 4, 128), torch.nan)

    def run():
        widened = triton_widened.widen(k_cache, v_cache, meta, qkv.dtype, 90, 8, 64)
        prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, 2, widened)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    meta.query_start_loc.copy_(torch.tensor([0, 100, 190]))
    for contexts in ([300, 90], [100, 90]):  # the second fits, then the first does
        meta.seq_lens.copy_(torch.tensor(contexts))
        graph.replay()
        caches = k_cache.double(), v_cache.double()
        wanted = reference.paged_attention(heads.split(qkv)[0].double(), *caches, meta, heads.scale)[:190]
        assert (out[:190].double() - wanted).norm() / wanted.norm() < 2e-3


def test_rows_below_the_bound_are_left_alone():
    check([(63, 63), (64, 64), (1, 9), (70, 200)], 4, 2, 64, torch.bfloat16, min_queries=64)
    qkv, heads, (k_cache, v_cache), meta = step([(1, 9)] * 3, 4, 2, 64, torch.bfloat16)
    out = qkv.new_full((3, 4, 64), torch.nan)
    prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, 2)
    assert out.isnan().all()


def test_tables_are_read_by_row_and_empty_requests_pass():
    qkv, heads, (k_cache, v_cache), meta = step([(300, 300), (40, 90)], 4, 2, 128, torch.bfloat16)
    out = qkv.new_full((340, 4, 128), torch.nan)
    prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, 2)
    turned = AttentionMeta(
        torch.cat([meta.query_start_loc, meta.query_start_loc[-1:].repeat(3)]),
        torch.cat([meta.seq_lens, meta.seq_lens.new_zeros(3)]), meta.block_tables.flip(0), 300, 300,
        rows=torch.tensor([1, 0, -1, -1, -1], dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    again = qkv.new_full((340, 4, 128), torch.nan)
    prefill.prefill(qkv, heads, k_cache, v_cache, turned, again, 2)
    assert torch.equal(out, again)


def test_a_captured_launch_serves_other_lengths():
    qkv, heads, (k_cache, v_cache), meta = step([(300, 300), (40, 90)], 4, 2, 128, torch.bfloat16)
    out = qkv.new_full((340, 4, 128), torch.nan)
    prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.prefill(qkv, heads, k_cache, v_cache, meta, out, 2)
    meta.query_start_loc.copy_(torch.tensor([0, 100, 188]))
    meta.seq_lens.copy_(torch.tensor([300, 90]))
    graph.replay()
    wanted = reference.paged_attention(
        heads.split(qkv)[0].double(), k_cache.double(), v_cache.double(), meta, heads.scale
    )[:188]
    assert (out[:188].double() - wanted).norm() / wanted.norm() < 1e-2
