"""Weights that know what a step reads behind them: kernels of few rows bring those bytes nearer, and compute what they did."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

import ops
from ops import tuning
from ops.gemm import weight as weights
from ops.stored import DECODED, FP8, NF4, Q8, W4, W8
from tests.ops.test_coded_linear import drawn, to
from tests.ops.test_decoded_linear import drawn as decoded


def prepared(kind: str, device: str) -> list[ops.LinearWeight]:
    """Three, of several sizes."""
    random = torch.Generator().manual_seed(0)
    sizes = [(256, 512), (512, 256), (2048, 512)]
    if kind == "plain":
        stored = [
            ops.StoredWeight.dense(torch.randn(*size, generator=random).to(device, torch.bfloat16)) for size in sizes
        ]
    else:
        codes, groups = {"fp8": (FP8, 1), "w8": (W8, 1), "w4": (W4, 4), "nf4": (NF4, 4), "q8": (Q8, 8)}[kind]
        make = decoded if codes in DECODED else drawn
        stored = [to(make(codes, *size, groups), device) for size in sizes]
    return [ops.prepare_linear(each, torch.bfloat16) for each in stored]


def test_a_cpu_brings_nothing_nearer():
    kept = prepared("plain", "cpu")
    ops.read_in_turn(kept)
    ops.read_in_turn([])
    assert all(each.next_bytes is None for each in kept)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "fp8", "w8", "w4", "nf4", "q8"])
def test_each_brings_the_first_bytes_of_the_next_and_computes_the_same(monkeypatch, kind):
    kept = prepared(kind, "cuda")
    x = [
        torch.randn(num_rows, each.in_features, device="cuda").bfloat16()
        for each in kept
        for num_rows in (1, 5, 16, 24)
    ]
    before = [ops.linear(each, kept[i // 4]) for i, each in enumerate(x)]
    of_device = tuning.of(torch.device("cuda", 0))
    linear = replace(of_device.linear, max_ahead_bytes=100_000)
    monkeypatch.setattr(weights.tuning, "of", lambda device: replace(of_device, linear=linear))
    ops.read_in_turn(kept)
    for each, following in zip(kept, [*kept[1:], kept[0]], strict=True):
        first = following.first_bytes()
        assert first is not None
        assert each.next_bytes is not None
        assert each.next_bytes.data_ptr() == first.data_ptr()
        assert each.next_bytes.nbytes == min(100_000, first.nbytes)
    after = [ops.linear(each, kept[i // 4]) for i, each in enumerate(x)]
    assert all(map(torch.equal, before, after))
