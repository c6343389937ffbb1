"""Triton's paged attention against the torch reference in float64: on the CPU by Triton's interpreter, on a GPU for real."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

import ops
from ops import tuning
from ops.attention import reference, triton_paged
from ops.attention.meta import AttentionMeta
from ops.attention.triton_paged import is_wide
from ops.tuning import files
from ops.tuning.numbers import QueryTiles
from tests.ops.places import DEVICES, interpreted_in_16_bits, interpreted_once, places

PLACES = places(1e-5, 2e-3, 1e-2)


def case(device, spans, heads, kv_heads, head_size, dtype, block_size=16, seed=0, padding=0):
    """`spans`: (query length, context length) by line. Blocks are scattered, unused cache is poisoned, tables stand in
    another order than the lines, and q is a view into a wider qkv with `padding` tokens at its end."""
    random = torch.Generator().manual_seed(seed)
    tables_needed = [-(-context // block_size) for _, context in spans]
    num_blocks = sum(tables_needed) + 3
    order = torch.randperm(num_blocks, generator=random).tolist()
    rows = torch.randperm(len(spans) + 2, generator=random)[: len(spans)]
    tables = torch.full((len(spans) + 2, max(*tables_needed, 1)), num_blocks - 1, dtype=torch.int32)
    shape = (num_blocks, kv_heads, block_size, head_size)
    k, v = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in "kv")
    for line, (_, context) in enumerate(spans):
        for index in range(tables_needed[line]):
            block = order.pop()
            tables[rows[line], index] = block
            used = min(block_size, context - index * block_size)
            for cache in (k, v):
                cache[block, :, :used] = torch.randn(kv_heads, used, head_size, generator=random, dtype=torch.float64)
    starts = torch.tensor([0, *(query for query, _ in spans)]).cumsum(0)
    qkv = torch.randn(int(starts[-1]) + padding, (heads + 2 * kv_heads) * head_size, generator=random)
    meta = AttentionMeta(
        starts.int().to(device), torch.tensor([c for _, c in spans], dtype=torch.int32, device=device),
        tables.to(device), max(query for query, _ in spans), max(context for _, context in spans),
        rows.int().to(device),
    )  # fmt: skip
    qkv, k, v = (t.to(device=device, dtype=dtype) for t in (qkv, k, v))
    return qkv[:, : heads * head_size].unflatten(1, (heads, head_size)), k, v, meta


def check(q, k, v, meta, tolerance, got=None, window=None, softcap=None, sinks=None, alibi=None):
    """Tokens of lines match the reference; others may hold anything."""
    used = int(meta.query_start_loc[-1])
    scale = q.shape[2] ** -0.5
    if got is None:
        got = triton_paged.paged_attention(q, k, v, meta, scale, window, softcap, sinks, alibi)
    assert got.shape == q.shape
    got = got[:used].double()
    wide = (tensor.double() for tensor in (q[:used], k, v))
    wanted = reference.paged_attention(*wide, meta, scale, window, softcap, sinks, alibi)
    assert got.isfinite().all()
    assert ((got - wanted).norm() / wanted.norm()) < tolerance


MIXES = {
    "decode": [(1, 1), (1, 70), (1, 600), (1, 16)],
    "mixed": [(5, 5), (1, 40), (17, 200), (37, 37), (1, 300)],
    "empty lines between": [(1, 20), (0, 0), (9, 9), (0, 0), (1, 5), (2, 2)],
}


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(4, 4, 64), (9, 3, 64), (4, 2, 128), (8, 1, 64), (4, 2, 256), (4, 1, 96)]
)
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_matches_the_reference(device, spans, heads, kv_heads, head_size, dtype, tolerance):
    check(*case(device, spans, heads, kv_heads, head_size, dtype), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_in_16_bits(PLACES))
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_matches_the_reference_in_16_bits(device, spans, dtype, tolerance):
    check(*case(device, spans, 6, 2, 64, dtype), tolerance)


def with_tiles(monkeypatch, **tiles):
    """Paged attention by these tiles instead of the device's."""
    real = tuning.of

    def of(device):
        by = real(device)
        paged = msgspec.structs.replace(by.attention.paged, **tiles)
        return msgspec.structs.replace(by, attention=msgspec.structs.replace(by.attention, paged=paged))

    monkeypatch.setattr(tuning, "of", of)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [place for place in PLACES if "float32" not in place.id])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_large_tiles_match_the_reference(monkeypatch, device, dtype, tolerance, head_size):
    """Those of steps with many tokens of 16 bits, which the small steps of the other tests would never choose."""
    with_tiles(monkeypatch, small_prefill=files.read("default").attention.paged.prefill)
    check(*case(device, [(150, 301), (1, 7), (64, 64), (128, 140)], 6, 2, head_size, dtype), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (8, 1)])
def test_a_group_packed_into_one_tile_matches_the_reference(monkeypatch, device, dtype, tolerance, heads, kv_heads):
    packed = {64: QueryTiles(32, 32, 4, 2, packed=True)}
    with_tiles(monkeypatch, small_prefill=packed, float32_prefill=packed)
    check(*case(device, [(40, 75), (1, 3), (7, 7), (2, 90)], heads, kv_heads, 64, dtype), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_blocks_may_be_smaller_or_larger_than_a_tile_or_neither(device, dtype, tolerance, block_size):
    check(*case(device, [(20, 150), (1, 131)], 4, 2, 64, dtype, block_size=block_size), tolerance)


def forget(k, v, meta, window):
    """Make NaN what no query of a line sees any more, as if its blocks had become somebody else's."""
    block_size, starts = k.shape[2], meta.query_start_loc.tolist()
    for line, context in enumerate(meta.seq_lens.tolist()):
        table = meta.block_tables[meta.rows[line]]
        first_query = context - (starts[line + 1] - starts[line])
        for position in range(max(0, first_query + 1 - window)):
            for cache in (k, v):
                cache[table[position // block_size], :, position % block_size] = torch.nan


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("window", [1, 70, 1000])
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_a_window_hides_what_stands_before_it(device, dtype, tolerance, window, spans):
    q, k, v, meta = case(device, spans, 4, 2, 64, dtype)
    forget(k, v, meta, window)
    check(q, k, v, meta, tolerance, window=window)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(2e-5, 2e-3, 1e-2)))
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_scores_are_capped_softly(device, dtype, tolerance, window, spans):
    q, k, v, meta = case(device, spans, 4, 2, 64, dtype)
    check(q * 8, k, v, meta, tolerance, window=window, softcap=5.0)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_sinks_take_their_share_and_add_nothing(device, dtype, tolerance, window, spans):
    q, k, v, meta = case(device, spans, 4, 2, 64, dtype)
    sinks = torch.tensor([0.0, 3.0, -50.0, 6.0], device=device)
    check(q, k, v, meta, tolerance, window=window, sinks=sinks)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 2.0)])
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_linear_biases_grow_with_the_distance(device, dtype, tolerance, window, softcap, spans):
    q, k, v, meta = case(device, spans, 6, 2, 64, dtype)
    alibi = torch.tensor([0.5, 0.25, 0.0, 0.004, 0.03, 0.7], device=device)
    check(q, k, v, meta, tolerance, window=window, softcap=softcap, alibi=alibi)


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_of_64_bits_reach_the_same_keys(monkeypatch, device):
    monkeypatch.setattr(triton_paged, "is_wide", lambda cache: True)
    check(*case(device, [(20, 150), (1, 131)], 4, 2, 64, torch.float32), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spans", [[(1, 33), (1, 20)], [(1, 33), (40, 50)]], ids=["decode", "mixed"])
def test_padding_of_a_graph_harms_nobody(device, spans):
    """Bounds are a graph's, not the step's; empty lines and tokens without a line stand at the end."""
    q, k, v, meta = case(device, spans, 4, 2, 64, torch.float32, padding=5)
    padded = replace(
        meta,
        query_start_loc=torch.cat([meta.query_start_loc, meta.query_start_loc[-1:].expand(3)]),
        seq_lens=torch.cat([meta.seq_lens, meta.seq_lens.new_zeros(3)]),
        rows=torch.cat([meta.rows, meta.rows.new_full((3,), -1)]),
        max_query_len=1 if spans[1][0] == 1 else q.shape[0],
        max_seq_len=4096,
    )
    got = triton_paged.paged_attention(q, k, v, padded, 0.125)
    check(q, k, v, meta, 1e-5, got)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_made_on_the_host_changes_nothing(device):
    lines = MIXES["mixed"]
    q, k, v, meta = case(device, lines, 4, 2, 64, torch.float32)
    starts = meta.query_start_loc.tolist()
    spans = tuple((starts[i], starts[i + 1], context) for i, (_, context) in enumerate(lines))
    check(q, k, v, replace(meta, spans=spans), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_host", [True, False], ids=["spans on the host", "spans on the device"])
def test_long_rows_are_left_alone_when_another_kernel_does_them(device, on_host):
    lines = [(20, 20), (20, 21), (1, 1), (19, 19), (40, 40)]
    q, k, v, meta = case(device, lines, 4, 2, 64, torch.float32)
    starts = meta.query_start_loc.tolist()
    if on_host:
        meta = replace(meta, spans=tuple((starts[i], starts[i + 1], context) for i, (_, context) in enumerate(lines)))
    out = reference.paged_attention(q, k, v, meta, 0.125)
    untouched = [(0, 40), (60, 100)]
    wanted = out.clone()
    for start, end in untouched:
        out[start:end] = wanted[start:end] = 7.0
    got = triton_paged.paged_attention(q, k, v, meta, 0.125, out=out, max_queries=19)
    assert got is out
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_line_without_rows_reads_its_own_table(device):
    q, k, v, meta = case(device, [(3, 40), (1, 20)], 4, 2, 64, torch.float32)
    own = replace(meta, block_tables=meta.block_tables[meta.rows.long()], rows=None)
    got = triton_paged.paged_attention(q, k, v, own, 0.125)
    torch.testing.assert_close(got, triton_paged.paged_attention(q, k, v, meta, 0.125), rtol=0, atol=0)


def test_offsets_take_64_bits_where_a_cache_has_so_many_numbers_or_stands_for_one_that_has():
    small, large = torch.empty(1 << 10, device="meta"), torch.empty(1 << 31, device="meta")
    assert (is_wide(small), is_wide(large)) == (False, True)
    with ops.caches_stand_for(2**21):
        assert is_wide(small)
    with ops.caches_stand_for(2**21 - 1):
        assert not is_wide(small)
    assert not is_wide(small)
