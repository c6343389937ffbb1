"""Products of fp8 on both sides by tiled_fp8.cu, every instance against float64 of what the codes are worth."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.cuda.program import missing_for_hopper
from ops.gemm import tiled_fp8
from ops.gemm.coded import RowsLinearWeight, prepare
from ops.gemm.triton_round import round_rows
from ops.stored import FP8
from tests.ops.test_coded_linear import drawn, error, exact, to
from tests.ops.test_tiled_w4 import gated

ON_HOPPER = pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))
# A result is rounded to 16 bits; within a chunk Hopper adds products of fp8 with some 14 bits.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 3e-3}


def worth(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [M, K] uint8, scales [groups, M] -> [M, K] float64."""
    groups = codes.view(torch.float8_e4m3fn).double().view(len(codes), len(scales), -1)
    return (groups * scales.t().double().unsqueeze(2)).flatten(1)


def test_every_shape_has_an_instance_or_says_that_it_has_none():
    assert tiled_fp8.fits(48, 4096, 1)
    assert tiled_fp8.fits(48, 4096, 32)
    assert not tiled_fp8.fits(48, 4096, 64)
    assert not tiled_fp8.fits(40, 4096, 1)
    for grouped in (False, True):
        known = tiled_fp8.tiles(grouped, gated=True)
        assert all(each.shared_bytes <= 227 << 10 and each.stages >= 2 for each in known)
        for num_rows in (17, 33, 65, 256, 8192):
            for in_features, out_features in ((128, 48), (4096, 4096), (14336, 4096), (4096, 28672)):
                tile, splits = tiled_fp8.choose(num_rows, in_features, out_features, grouped, True, 132)
                assert tile in known
                assert splits == 1 or in_features >= 128 * splits


def test_scales_with_slack_are_the_same_numbers():
    scales = torch.rand(3, 48)
    room = tiled_fp8.with_slack(scales)
    assert torch.equal(room, scales)
    assert room.untyped_storage().nbytes() >= scales.nbytes + 4 * tiled_fp8.SLACK


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("grouped", [False, True])
def test_every_instance_at_odd_shapes(grouped, dtype):
    instances = [each for gate in (False, True) for each in tiled_fp8.tiles(grouped, gate)]
    tiled_fp8.program().compile_ahead([each.name for each in instances], dtype, torch.device("cuda", 0))
    for out_features, in_features in ((192, 640), (1088, 1152), (64, 128)):
        groups = in_features // 128 if grouped else 1
        stored = to(drawn(FP8, out_features, in_features, groups), "cuda")
        bias = torch.randn(out_features, device="cuda", dtype=dtype)
        kept = RowsLinearWeight(stored)._codes
        for tile in instances:
            for num_rows, splits in ((tile.rows - 3, 1), (tile.rows, 4), (2 * tile.rows + 1, 2)):
                if splits * 128 > in_features:
                    continue
                x = torch.randn(num_rows, in_features, device="cuda", dtype=dtype)
                codes, x_scales = round_rows(x, FP8, groups, tiled_fp8.SLACK)
                out = tiled_fp8.tiled_fp8(
                    codes, x_scales, kept.weight, kept.scales, bias, dtype, gated=tile.gated, tile=tile, splits=splits
                )
                wanted = exact(worth(codes, x_scales), stored.with_bias(bias))
                wanted = gated(wanted) if tile.gated else wanted
                assert error(out, wanted) < (2 if tile.gated else 1) * TOLERANCE[dtype], (tile, num_rows, splits)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_blocks_at_any_number_of_rows(dtype):
    stored = to(drawn(FP8, 208, 384, 3), "cuda")
    bias = torch.randn(208, device="cuda", dtype=dtype)
    prepared = prepare(stored.with_bias(bias))
    for num_rows in (17, 64, 129, 300, 2500):
        x = torch.randn(num_rows, 384, device="cuda", dtype=dtype)
        wanted = exact(x, stored.with_bias(bias))
        assert error(ops.linear(x, prepared), wanted) < 0.05, num_rows  # x has four bits of mantissa
        assert error(ops.gated_linear(x, prepared), gated(wanted)) < 0.1, num_rows
