"""Caches of fp8 numbers and of int8 entries: what is written into them, and attention that reads them, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

import ops
from ops.attention import (
    _attend_in_parts,
    _attend_latent_in_parts,
    cuda,
    layer,
    prefill,
    reference,
    triton_latent,
    triton_paged,
)
from ops.attention.heads import AttentionHeads, LatentHeads
from ops.kv.eight_bits import FP8, LARGEST, from_int8_entries, to_fp8, to_int8_entries
from ops.kv.reference import store_kv
from ops.rope.triton_qkv import norm_rope_store
from tests.ops import test_cuda_decode as single_queries
from tests.ops import test_op_latent as latents
from tests.ops import test_triton_attention as paged
from tests.ops import test_triton_qkv as qkvs
from tests.ops.places import DEVICES, interpreted_in_16_bits, interpreted_once, places

PLACES = places(1e-5, 2e-3, 1e-2)
KINDS = ["fp8", "int8"]
KV_SCALES = (0.03, 1.7)


@pytest.fixture(autouse=True)
def _round_as_devices_do(monkeypatch):
    """Triton's interpreter (3.6 to 3.9) rounds up into an exponent by a bitwise or, which loses the carry: 15.9 would become 8."""
    if torch.cuda.is_available():
        return
    interpreted = interpreter._convert_float

    def convert(values, source, target, rounding):
        if target.name != "fp8e4nv":
            return interpreted(values, source, target, rounding)
        return torch.from_numpy(values.astype("float32")).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def eight_bits(kind: str, x: Tensor) -> Tensor:
    return to_fp8(x, 1.0) if kind == "fp8" else to_int8_entries(x)


def wide(cache: Tensor) -> Tensor:
    """What its numbers are worth, but for scales of fp8."""
    return (from_int8_entries(cache) if cache.dtype == torch.int8 else cache).double()


def by_references(function, *arguments) -> Tensor:
    """In float64, which no kernel of a GPU computes."""
    ops.force("reference")
    try:
        return function(*arguments)
    finally:
        ops.force(None)


def check(kind, device, spans, heads, kv_heads, size, dtype, tolerance, **limits):
    q, k, v, meta = paged.case(device, spans, heads, kv_heads, size, dtype)
    if "window" in limits:
        paged.forget(k, v, meta, limits["window"])
    caches = [eight_bits(kind, cache) for cache in (k, v)]
    got = triton_paged.paged_attention(q, *caches, meta, size**-0.5, **limits, out_scale=0.5)
    wanted = reference.paged_attention(q.double(), *map(wide, caches), meta, size**-0.5, **limits) * 0.5
    assert got.isfinite().all()
    assert (got.double() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 1, 64), (4, 1, 96)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_reads_them_as_they_are(kind, device, heads, kv_heads, size, dtype, tolerance):
    spans = paged.MIXES["mixed" if size == 64 else "decode"]
    check(kind, device, spans, heads, kv_heads, size, dtype, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_in_16_bits(PLACES))
@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_16_bits_reads_them(kind, device, dtype, tolerance):
    check(kind, device, paged.MIXES["mixed"], 4, 2, 64, dtype, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize(
    ("kind", "limit"), [("fp8", "window"), ("int8", "softcap"), ("int8", "sinks"), ("fp8", "alibi")]
)
def test_limits_hold_for_them_too(kind, device, limit, dtype, tolerance):
    given = {
        "window": 50, "softcap": 3.0, "sinks": torch.tensor([0.0, 3.0, -50.0, 6.0], device=device),
        "alibi": torch.tensor([0.5, 0.0, 0.004, 0.7], device=device),
    }  # fmt: skip
    check(kind, device, paged.MIXES["mixed"], 4, 2, 64, dtype, tolerance, **{limit: given[limit]})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_of_large_steps_reads_them(monkeypatch, kind, device):
    tiles = paged.files.read("default").attention.paged.prefill
    paged.with_tiles(monkeypatch, small_prefill=tiles)
    check(kind, device, [(150, 301), (1, 7)], 2, 2, 64, torch.float16, 2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(7, 4, 2, 64, 64), (5, 8, 1, 256, 64), (6, 4, 4, 96, 32), (5, 6, 1, 64, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pass_before_attention_writes_what_the_reference_does(kind, device, shape):
    _, heads, kv_heads, size, _ = shape
    qkv, norms, positions, cos_sin, caches, slots = qkvs.inputs(*shape, torch.float32, device)
    caches = [eight_bits(kind, cache) for cache in caches]
    wanted, alone = [cache.clone() for cache in caches], qkv.clone()
    norm_rope_store(qkv, heads, kv_heads, size, norms, 1e-6, positions, cos_sin, *caches, slots, KV_SCALES)
    norm_rope_store(alone, heads, kv_heads, size, norms, 1e-6, positions, cos_sin)
    _, k, v = alone.unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], dim=1)
    store_kv(k, v, *wanted, slots, KV_SCALES)
    for got, want in zip(caches, wanted, strict=True):
        # A division may be half a unit off, so that what lies between two numbers becomes the other one.
        assert (wide(got) - wide(want)).norm() / wide(want).norm() < 1e-3
        assert (got.view(torch.int8) != want.view(torch.int8)).float().mean() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none_and_what_is_too_large_is_cut(kind, device):
    qkv = torch.ones(4, 3 * 64, device=device)
    qkv[1, 64], qkv[2, 70], qkv[3, 130] = torch.nan, 1e9, 0.0
    caches = [eight_bits(kind, torch.zeros(1, 1, 16, 64, device=device)) for _ in "kv"]
    wanted = [cache.clone() for cache in caches]
    no_turn, slots = torch.empty(4, 0, device=device), torch.arange(4, device=device)
    norm_rope_store(qkv, 1, 1, 64, None, 0.0, slots, no_turn, *caches, slots)
    _, k, v = qkv.view(4, 3, 1, 64).unbind(1)
    store_kv(k, v, *wanted, slots)
    for got, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(wide(got), wide(want), equal_nan=True)
    keys = wide(caches[0])[0, 0]
    assert keys[1].isnan().any()
    assert keys[2].max() == (LARGEST if kind == "fp8" else 1e9)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-3, 5e-3, 2e-2)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [True, False], ids=["single queries", "mixed"])
def test_a_layer_divides_by_its_scales_and_multiplies_by_them(kind, device, single, dtype, tolerance):
    spans = paged.MIXES["decode"] if single else [(5, 5), (1, 40), (17, 37)]
    _, k, v, meta = paged.case(device, spans, 4, 2, 64, dtype)
    caches = [eight_bits(kind, cache.nan_to_num()) for cache in (k, v)]
    meta = replace(meta, uniform=single)
    starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    positions = torch.cat([torch.arange(lens[i] - starts[i + 1] + starts[i], lens[i]) for i in range(len(lens))])
    rows = torch.cat([torch.full((starts[i + 1] - starts[i],), int(meta.rows[i])) for i in range(len(lens))])
    positions, rows = positions.to(device), rows.to(device)
    slots = meta.block_tables[rows, positions // 16].long() * 16 + positions % 16
    qkv = torch.randn(starts[-1], 8 * 64).to(device, dtype)
    angles = torch.rand(max(lens) + 1, 32, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    heads = AttentionHeads(4, 2, 64, 0.125, cos_sin, kv_scales=KV_SCALES)
    exact = [cache.clone() for cache in caches]
    exact_heads = replace(heads, cos_sin=cos_sin.double())
    wanted = by_references(_attend_in_parts, qkv.double(), exact_heads, positions, *exact, slots, meta)
    got = layer.attend(qkv, heads, positions, *caches, slots, meta)
    assert (got.double() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(5e-3, 1e-2, 2e-2)))
@pytest.mark.parametrize("spans", latents.MIXES.values(), ids=latents.MIXES)
def test_latents_of_fp8(device, dtype, tolerance, spans):
    q, latent, heads, positions, cache, slots, meta = latents.case(spans).to(device, dtype)
    heads = LatentHeads(heads.num_heads, heads.rank, heads.scale, heads.cos_sin, 0.03)
    cache = to_fp8(cache, 0.03)
    exact_heads = replace(heads, cos_sin=heads.cos_sin.double())
    exact = cache.clone()
    wanted = by_references(
        _attend_latent_in_parts, q.double(), latent.double(), exact_heads, positions, exact, slots, meta
    )
    got = triton_latent.attend_latent(q.contiguous(), latent.contiguous(), heads, positions, cache, slots, meta)
    assert (got.double() - wanted).norm() / wanted.norm() < tolerance
    same = cache.view(torch.int8) == exact.view(torch.int8)
    assert same.float().mean() > 0.99  # rotation in another precision may end at the number beside


def test_blocks_of_tokens_that_see_each_other_read_scaled_numbers():
    """A block of one token adds nothing to a causal mask."""
    _, k, v, meta = paged.case("cpu", [(3, 20)], 4, 2, 64, torch.float32)
    caches = [to_fp8(cache.nan_to_num(), 1.0) for cache in (k, v)]
    positions = torch.arange(17, 20)
    slots = meta.block_tables[int(meta.rows[0]), positions // 16].long() * 16 + positions % 16
    heads = AttentionHeads(4, 2, 64, 0.125, torch.empty(30, 0), kv_scales=KV_SCALES)
    qkv = torch.randn(3, 8 * 64)
    wanted = ops.attend(qkv.clone(), heads, positions, *(cache.clone() for cache in caches), slots, meta)
    one = ops.TokenBlock(int(meta.rows[0]), 2, 3, 19)
    got = ops.attend_blocks(qkv, heads, positions, *caches, slots, meta, [one])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prompts_on_hopper_read_fp8_beside_their_own_numbers(dtype):
    _, k, _, meta = paged.case("cpu", [(3, 20)], 4, 2, 64, torch.float32)
    heads = AttentionHeads(4, 2, 64, 0.125, torch.empty(30, 0))
    for cache in (k.to(dtype), eight_bits("fp8", k.nan_to_num())):
        assert prefill.refusal(heads, cache, dtype, meta) is None
    for cache in (k, eight_bits("int8", k.nan_to_num())):
        assert prefill.refusal(heads, cache, dtype, meta)
    assert prefill.refusal(heads, k, torch.float32, meta)


def test_a_captured_step_leaves_the_same_rows_of_fp8_to_each_kernel(monkeypatch):
    monkeypatch.setattr(layer.program, "missing_for_hopper", lambda: None)
    _, k, _, meta = paged.case("cpu", [(100, 100), (3, 20)], 4, 2, 64, torch.bfloat16)
    heads, qkv = AttentionHeads(4, 2, 64, 0.125, torch.empty(100, 0)), torch.empty(103, 512, dtype=torch.bfloat16)
    known = replace(meta, spans=((0, 100, 100), (100, 103, 20)))
    codes = eight_bits("fp8", k.nan_to_num())
    assert (
        layer._min_prefill_queries(qkv, heads, codes, known) == layer._min_prefill_queries(qkv, heads, codes, meta) == 2
    )
    assert layer._min_prefill_queries(qkv, heads, k, known) > layer._min_prefill_queries(qkv, heads, k, meta) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [True, False], ids=["normed", "half of each head turns"])
@pytest.mark.parametrize("shape", single_queries.HEADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_of_single_queries_writes_and_reads_them(kind, shape, norm, dtype):
    for contexts in single_queries.CONTEXTS:
        qkv, heads, caches, meta = single_queries.step(contexts, *shape, norm=norm, dtype=dtype)
        heads = replace(heads, kv_scales=(0.05, 0.7))
        scaled = zip(caches, heads.kv_scales, strict=True)
        caches = [to_fp8(cache, scale) if kind == "fp8" else to_int8_entries(cache) for cache, scale in scaled]
        assert cuda.refusal(heads, caches[0], dtype) is None
        parts, exact = [cache.clone() for cache in caches], replace(heads, cos_sin=heads.cos_sin.double(), norms=None)
        q, k, v = (part.double().clone() for part in heads.split(qkv))
        if heads.norms is not None:
            for part, weight in zip((q, k), heads.norms, strict=True):
                part.mul_(torch.rsqrt(part.square().mean(-1, keepdim=True) + heads.norm_eps) * weight.double())
        normed, positions = torch.cat([q, k, v], 1).flatten(1), meta.seq_lens.long() - 1
        blocks = meta.block_tables.long().gather(1, positions[:, None] // 16)[:, 0]
        wanted = by_references(_attend_in_parts, normed, exact, positions, *parts, blocks * 16 + positions % 16, meta)
        out = torch.full((len(contexts), *shape[::2]), float("nan"), device="cuda", dtype=dtype)
        cuda.decode(qkv, heads, *caches, meta, out, fused=True)
        assert single_queries.error(out.flatten(1), wanted) < 2e-2, contexts[:4]
        for got, want in zip(caches, parts, strict=True):
            if kind == "fp8":
                assert (got.view(torch.int8) != want.view(torch.int8)).float().mean() < 1e-2
            assert single_queries.error(wide(got), wide(want)) < 1e-2 * (1 + (kind == "int8"))
        again = torch.full_like(out, float("nan"))
        rotated = normed.to(dtype)  # by the reference, where it stands
        cuda.decode(rotated, heads, *caches, meta, again, fused=False)
        assert single_queries.error(again.flatten(1), wanted) < 2e-2, contexts[:4]


def test_numbers_beyond_the_largest_become_it():
    x = torch.tensor([[[500.0, -1e30, torch.inf, 447.0, torch.nan, 0.001]]])
    caches = [torch.zeros(1, 1, 1, 6).to(FP8) for _ in "kv"]
    ops.store_kv(x, x, *caches, torch.tensor([0]), (1.0, 100.0))
    keys, values = (cache.double().flatten() for cache in caches)
    assert keys[:4].tolist() == [448, -448, 448, 448]
    assert keys[4].isnan()
    assert values[0] == 5
    assert values[1:3].tolist() == [-448, 448]
