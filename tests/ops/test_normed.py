"""RMS norm and rounding to fp8 in one pass: what the norm and then the rounding give."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.cuda.program import missing_for_hopper
from ops.gemm import rounded, triton_normed
from ops.gemm.triton_round import round_rows
from ops.gemm.weight import LinearWeight
from ops.norm import triton_norm
from ops.stored import FP8
from tests.ops.places import DEVICES
from tests.ops.test_coded_linear import drawn, to


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = codes.view(torch.float8_e4m3fn).double().view(len(codes), len(scales), -1)
    return (groups * scales.t().double().unsqueeze(2)).flatten(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("hidden", "groups"), [(96, 1), (384, 3), (512, 4), (1000, 1)])
@pytest.mark.parametrize("added", [False, True])
def test_one_pass_gives_what_two_do(device, hidden, groups, added):
    random = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # which the interpreter rounds to
    x, residual = (torch.randn(5, hidden, generator=random).to(device, dtype) for _ in "xr")
    weight = torch.randn(hidden, generator=random).to(device, dtype)
    residual[2] = 0
    x[2] = 0
    kept = residual.clone()
    got = triton_normed.rms_norm(x if added else None, residual, weight, 1e-6, groups, 8)
    if added:
        normed = triton_norm.add_rms_norm(x, kept, weight, 1e-6)
    else:
        normed = triton_norm.rms_norm(kept, weight, 1e-6)
    assert torch.equal(residual, kept)
    assert got.dtype == dtype
    assert got.scales.stride(0) % 4 == 0
    wanted = values(*round_rows(normed, FP8, groups, 8))
    # The mean's sum may be in another order, so that some number is rounded to the neighbouring one.
    assert (values(got.codes, got.scales) - wanted).norm() / wanted.norm() < 2e-3
    assert (got.scales[:, 2] > 0).all()


def test_what_it_rounds():
    assert rounded.fits(4096, 1)
    assert rounded.fits(5120, 40)
    assert not rounded.fits(4800, 4800 // 96)
    assert not rounded.fits(16512, 1)


def test_others_get_the_norm_itself():
    weight = ops.prepare_linear(ops.StoredWeight.dense(torch.randn(8, 16)))
    x, residual = torch.randn(2, 3, 16).unbind()
    wanted = ops.add_rms_norm(x, residual.clone(), torch.ones(16), 1e-6)
    given = ops.normed_for(weight, x, residual, torch.ones(16), 1e-6)
    assert isinstance(given, torch.Tensor)
    assert torch.equal(given, wanted)
    assert torch.equal(ops.normed_for(weight, None, residual, torch.ones(16), 1e-6), wanted)
    with pytest.raises(TypeError, match="rounds nothing"):
        LinearWeight.matmul_rounded(weight, given)


@pytest.mark.gpu
@pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))
@pytest.mark.parametrize("groups", [1, 4])
def test_a_layer_computes_the_same_of_either(groups):
    gate_up, down = (
        ops.prepare_linear(to(drawn(FP8, *size, groups), "cuda"), torch.bfloat16) for size in ((2048, 512), (512, 1024))
    )
    norm = torch.rand(512, device="cuda").bfloat16() + 0.5
    for num_rows in (1, 16, 17, 63, 300):
        x, residual = torch.randn(2, num_rows, 512, device="cuda").bfloat16().unbind()
        kept = residual.clone()
        given = ops.normed_for(gate_up, x, residual, norm, 1e-6)
        assert isinstance(given, ops.RoundedRows) == (num_rows > 16)
        plain = ops.add_rms_norm(x, kept, norm, 1e-6)
        assert torch.equal(residual, kept)
        for got, wanted in (
            (ops.linear(given, gate_up), ops.linear(plain, gate_up)),
            (ops.gated_mlp(given, gate_up, down), ops.gated_mlp(plain, gate_up, down)),
        ):
            assert (got.double() - wanted.double()).norm() / wanted.double().norm() < 1e-2
