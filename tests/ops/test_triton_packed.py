"""Triton's attention within a step against the torch reference in float64: on a CPU by Triton's interpreter, on a GPU for real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ops
from ops.attention import _attend_packed, _attend_packed_in_parts, triton_packed
from ops.registry import ShapeClass
from tests.ops.places import DEVICES, interpreted_in_16_bits, interpreted_once, places

PLACES = places(1e-5, 2e-3, 1e-2)
MIXES = {
    "texts": [5, 1, 70, 17],
    "alike": [33, 33],
    "one": [130],
    "empty rows between": [3, 0, 40, 0],
}


def case(device, lengths, heads, kv_heads, head_size, dtype, *, turned=0, padding=0, **more):
    """qkv of rows side by side, with `padding` tokens behind them that are not numbers; heads, positions and meta."""
    random = torch.Generator().manual_seed(len(lengths) + head_size)
    qkv = torch.randn(sum(lengths) + padding, (heads + 2 * kv_heads) * head_size, generator=random)
    qkv[sum(lengths) :] = torch.nan
    positions = torch.cat([torch.arange(length) for length in [*lengths, padding]])
    angles = torch.arange(max(*lengths, 2))[:, None] * 100 ** -(torch.arange(0, turned, 2) / max(1, turned))
    ours = ops.AttentionHeads(
        heads, kv_heads, head_size, head_size**-0.5, torch.cat([angles.cos(), angles.sin()], 1).to(device), mask="full"
    )
    starts = torch.tensor([0, *lengths]).cumsum(0)
    meta = ops.AttentionMeta(
        starts.int().to(device), torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.empty(len(lengths), 0, dtype=torch.int32, device=device), max(lengths), max(lengths),
    )  # fmt: skip
    return qkv.to(device, dtype), replace(ours, **more), positions.to(device), meta


def check(qkv, heads, positions, meta, tolerance):
    used = int(meta.query_start_loc[-1])
    wide = replace(
        heads,
        norms=None if heads.norms is None else tuple(each.double() for each in heads.norms),
        cos_sin=heads.cos_sin.double(),
    )
    wanted = _attend_packed_in_parts(qkv[:used].double(), wide, positions[:used], meta)
    got = triton_packed.attend_packed(qkv.clone(), heads, positions, meta)[:used].double()
    assert got.isfinite().all()
    assert ((got - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("lengths", [[33, 33, 33], [33, 12], [70]], ids=str)
def test_rows_whose_lengths_the_host_knows(device, lengths, kv_heads, dtype, tolerance):
    """Of one length and 16 bits they are torch's, where a head fills half of its lanes."""
    qkv, heads, positions, meta = case(device, lengths, 2, kv_heads, 72, dtype, turned=24)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = tuple((end - length, end, length) for end, length in zip(ends, lengths, strict=True))
    check(qkv, heads, positions, replace(meta, spans=spans), tolerance)
    alike = len(set(lengths)) == 1 and dtype != torch.float32
    known = triton_packed._one_length(qkv, heads, replace(meta, spans=spans), 128)
    assert known == (lengths[0] if alike else None)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(3, 3, 64), (4, 2, 32), (2, 1, 96), (2, 2, 128)])
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_every_query_sees_its_row_and_no_other(device, lengths, heads, kv_heads, head_size, dtype, tolerance):
    check(*case(device, lengths, heads, kv_heads, head_size, dtype, padding=3), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_in_16_bits(PLACES))
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_in_16_bits(device, lengths, dtype, tolerance):
    check(*case(device, lengths, 2, 2, 64, dtype), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("window", [1, 2, 30, 64, 400])
def test_a_window_reaches_both_ways(device, window, dtype, tolerance):
    check(*case(device, [5, 150, 64, 1], 2, 2, 64, dtype, window=window), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("limits", [{}, {"window": 20}, {"softcap": 3.0}])
def test_relative_biases_go_by_distance(device, limits, dtype, tolerance):
    biases = torch.randn(3, 2 * 200 - 1, generator=torch.Generator().manual_seed(2)).to(device)
    check(*case(device, [5, 150, 1], 3, 3, 64, dtype, relative_bias=biases, **limits), tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [0, 32, 64])
def test_heads_are_normed_and_turned_before(device, turned, normed, dtype, tolerance):
    norms = tuple(torch.rand(64, device=device, dtype=dtype) + 0.5 for _ in "qk") if normed else None
    sinks = torch.randn(4, device=device)
    qkv, heads, positions, meta = case(
        device, [9, 40], 4, 2, 64, dtype, turned=turned, norms=norms, norm_eps=1e-6, sinks=sinks
    )
    check(qkv, heads, positions, meta, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
def test_lengths_known_to_the_host_change_nothing(device, dtype, tolerance):
    qkv, heads, positions, meta = case(device, [70, 3, 128], 2, 2, 64, dtype)
    spans = ((0, 70, 70), (70, 73, 3), (73, 201, 128))
    known = triton_packed.attend_packed(qkv.clone(), heads, positions, replace(meta, spans=spans))
    assert torch.equal(known, triton_packed.attend_packed(qkv.clone(), heads, positions, meta))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.nightly
def test_many_rows(device):
    check(*case(device, [2, 1, 3] * 50, 1, 1, 64, torch.float32), 1e-5)


def test_a_step_without_tokens_is_nothing():
    qkv, heads, positions, meta = case("cpu", [0], 2, 2, 64, torch.float32)
    assert triton_packed.attend_packed(qkv, heads, positions, meta).shape == (0, 128)


def test_biases_that_know_one_direction_only_are_refused():
    qkv, heads, positions, meta = case("cpu", [3], 2, 2, 64, torch.float32, alibi=torch.ones(2))
    with pytest.raises(ValueError, match="causal mask"):
        triton_packed.attend_packed(qkv, heads, positions, meta)


@pytest.mark.parametrize(
    ("mask", "device", "chosen"),
    [("full", "cuda", "triton"), ("causal", "cuda", "reference"), ("full", "cpu", "torch")],
)
def test_full_masks_on_cuda_are_its(mask, device, chosen):
    case = ShapeClass(device, torch.bfloat16, None, 64, mask=mask)
    assert next(kernel.name for kernel in _attend_packed.kernels if kernel.supports(case) is None) == chosen
