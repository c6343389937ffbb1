"""Weights of four bits in pieces: how they lie, and every instance of tiled_w4.cu against float64."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.cuda.program import missing_for_hopper
from ops.gemm import pieces, tiled_w4, triton_widen
from ops.gemm.coded import TiledLinearWeight, prepare
from ops.gemm.dequantize import codes_of, dequantize
from ops.gemm.lay import lay
from ops.stored import FP8, Q8, W4, StoredWeight
from tests.ops.places import DEVICES
from tests.ops.test_coded_linear import TOLERANCE, drawn, error, exact, to

ON_HOPPER = pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))


def pieces_of(stored: StoredWeight) -> torch.Tensor:
    return lay((stored,), in_pieces=True)["pieces"]


def gated(wanted: torch.Tensor) -> torch.Tensor:
    gate, up = wanted.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def test_each_lane_finds_its_codes_side_by_side():
    stored = drawn(W4, 48, 256, 4, zeros=True)
    laid, codes = pieces_of(stored), codes_of(W4, stored.weight)
    assert laid.shape == (2, 2, 32 * (64 + 2 * 4))
    for row, column in ((0, 0), (17, 1), (31, 9), (33, 127), (47, 128), (40, 255)):
        piece = laid[row // 32, column // 128]
        word, bits = column % 128 // 32, column % 32 // 8 * 4  # columns 8 apart are 4 bits apart
        lane, half = column % 8 // 2, column % 2
        words = piece[: 32 * 64].view(torch.int32).view(32, 4, 4)
        assert int(words[row % 32, lane, word]) >> (half * 16 + bits) & 15 == codes[row, column]
        scale = piece[32 * 64 :].view(torch.int32).view(2, 32)[column % 128 // 64, row % 32]
        assert scale & 15 == stored.tensors["zeros"][row, column // 64]
        assert (scale & -256).view(torch.float32) == stored.tensors["scales"][row, column // 64]


def test_each_lane_finds_its_fp8_side_by_side():
    stored = drawn(FP8, 48, 256, 2)
    codes, scales = stored.weight.view(torch.uint8), stored.tensors["scales"].t().contiguous()
    laid = pieces.in_pieces(FP8, codes, scales)
    assert laid.shape == (2, 2, 32 * (128 + 4))
    assert pieces.groups_of(FP8, laid) == 1
    for row, column in ((0, 0), (17, 1), (31, 9), (33, 127), (47, 128), (40, 255), (5, 70)):
        piece, inside = laid[row // 32, column // 128], column % 128
        halves = piece[: 32 * 128].view(2, 32, 4, 4, 2, 2)  # [half, row, lane, word, 8 columns, column]
        lane = inside % 8 // 2
        assert (
            halves[inside // 64, row % 32, lane, inside % 64 // 16, inside % 16 // 8, inside % 2] == codes[row, column]
        )
        assert piece[32 * 128 :].view(torch.float32)[row % 32] == scales[column // 128, row]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("in_features", "groups"), [(192, 1), (192, 3), (256, 4), (384, 12), (512, 2)])
def test_pieces_are_widened(device, in_features, groups):
    stored = to(drawn(W4, 48, in_features, groups, zeros=True), device)
    widened = triton_widen.widen_pieces(pieces_of(stored), 48, in_features, torch.float32)
    assert torch.equal(widened, dequantize(stored))


def test_every_shape_has_an_instance_or_says_that_it_has_none():
    assert pieces.groups_of_chunk(W4, 4096, 1) == pieces.groups_of_chunk(W4, 4096, 16) == 1
    assert [pieces.groups_of_chunk(W4, 4096, 4096 // group) for group in (128, 64, 32, 16)] == [1, 2, 4, None]
    assert pieces.groups_of_chunk(W4, 576, 3) is None  # groups of 192
    assert pieces.fits(W4, 48, 192, 1)
    assert not pieces.fits(W4, 40, 192, 1)
    for groups in (1, 2, 4):
        known = tiled_w4.tiles(groups, gated=True)
        assert all(each.shared_bytes <= 227 << 10 and each.stages >= 2 for each in known)
        for num_rows in (1, 8, 9, 17, 33, 65, 256, 1000):
            for in_features, out_features in ((128, 48), (4096, 4096), (14336, 4096), (4096, 28672)):
                tile, splits = tiled_w4.choose(num_rows, in_features, out_features, groups, True, 132)
                assert tile in known
                assert splits == 1 or in_features >= 128 * splits


def test_bytes_have_three_stages_where_tiles_are_many():
    for codes, rows, wgs in ((W4, 256, 2), (Q8, 128, 4)):
        tile, splits = tiled_w4.choose(256, 4096, 28672, 4, True, 132, torch.bfloat16, codes)
        assert (tile.rows, tile.wgs, splits) == (rows, wgs, 1)
        assert tile in tiled_w4.tiles(4, True, codes)
        assert tile.stages == 3
    assert tiled_w4.choose(256, 14336, 4096, 4, False, 132, torch.bfloat16, Q8)[0].rows == 256


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_instance_at_odd_shapes(groups, dtype):
    instances = [each for gate in (False, True) for each in tiled_w4.tiles(groups, gate)]
    tiled_w4.program().compile_ahead([each.name("tiled_w4") for each in instances], dtype, torch.device("cuda", 0))
    for out_features, in_features in ((192, 640), (1088, 1152), (64, 128)):
        stored = to(drawn(W4, out_features, in_features, in_features // 128 * groups, zeros=True), "cuda")
        bias = torch.randn(out_features, device="cuda", dtype=dtype)
        laid = pieces_of(stored)
        for tile in instances:
            for num_rows, splits in ((tile.rows - 3, 1), (tile.rows, 4), (2 * tile.rows + 1, 2)):
                if splits * 128 > in_features:
                    continue
                x = torch.randn(num_rows, in_features, device="cuda", dtype=dtype)
                out = tiled_w4.tiled_w4(x, laid, out_features, bias, gated=tile.gated, tile=tile, splits=splits)
                wanted = exact(x, stored.with_bias(bias))
                wanted = gated(wanted) if tile.gated else wanted
                assert error(out, wanted) < (2 if tile.gated else 1) * TOLERANCE[dtype], (tile, num_rows, splits)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("in_features", "groups"), [(256, 1), (264, 1), (384, 12)])
def test_any_number_of_rows_beside_an_order_of_columns(in_features, groups, dtype):
    stored = drawn(W4, 208, in_features, groups, zeros=True)
    order = torch.randperm(in_features).int()
    stored = to(StoredWeight(W4, {**stored.tensors, "order": order}), "cuda")
    bias = torch.randn(208, device="cuda", dtype=dtype)
    prepared = prepare(stored.with_bias(bias))
    assert isinstance(prepared, TiledLinearWeight)
    for num_rows in (0, 1, 5, 17, 64, 129, 300, 2500):
        x = torch.randn(num_rows, in_features, device="cuda", dtype=dtype)
        out = ops.linear(x, prepared)
        assert out.shape == (num_rows, 208)
        if num_rows:
            wanted = exact(x, stored.with_bias(bias))
            assert error(out, wanted) < TOLERANCE[dtype], num_rows
            assert error(ops.gated_linear(x, prepared), gated(wanted)) < 2 * TOLERANCE[dtype], num_rows


@ON_HOPPER
@pytest.mark.gpu
def test_four_bits_are_refilled_where_they_lie():
    parts = [to(drawn(W4, rows, 256, groups, seed=rows), "cuda") for rows, groups in ((64, 2), (32, 4), (16, 1))]
    prepared = prepare(parts)
    assert isinstance(prepared, TiledLinearWeight)
    others = [to(drawn(W4, rows, 256, 1, zeros=True, seed=rows + 1), "cuda") for rows in (64, 32, 16)]
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    for given in (parts, others):
        assert given is parts or prepared.refill(given)
        wanted = torch.cat([exact(x, part) for part in given], 1)
        assert error(ops.linear(x, prepared), wanted) < TOLERANCE[torch.bfloat16]
