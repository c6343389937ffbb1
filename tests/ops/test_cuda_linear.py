"""Linear layers on CUDA, two kernels of our own and cuBLAS behind one LinearWeight, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import ops
from ops.cuda.program import missing_for_hopper
from ops.gemm import few_rows, tiled
from ops.gemm.cuda import CudaLinearWeight
from ops.gemm.warpgroups import SHARED_BYTES

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SHAPES = [
    (192, 576),
    (1024, 2048),
    (96, 32),
    (2080, 1056),
]  # out, in: neither a power of two nor many multiples of anything
FEATURES = (32, 1024, 3072, 14336)
on_hopper = pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))


def drawn(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype):
    x = torch.randn(num_rows, in_features, device="cuda", dtype=dtype)
    weight = torch.randn(out_features, in_features, device="cuda", dtype=dtype) * in_features**-0.5
    return x, weight, torch.randn(out_features, device="cuda", dtype=dtype)


def expected(x, weight, bias, *, gated: bool) -> torch.Tensor:
    out = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    return out


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", few_rows.VARIANTS, ids=lambda variant: variant.name)
def test_every_stream_at_every_shape(variant, dtype):
    for out_features, in_features in SHAPES:
        for num_rows in sorted({1, 8 * variant.tiles - 3, 8 * variant.tiles}):
            x, weight, bias = drawn(num_rows, out_features, in_features, dtype)
            for maybe_bias in (bias, None):
                out = few_rows.few_rows(x, weight, maybe_bias, gated=variant.gated, variant=variant)
                exact = expected(x, weight, maybe_bias, gated=variant.gated)
                assert error(out, exact) < TOLERANCE[dtype], (num_rows, out_features, in_features)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", tiled.TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_every_tile_at_every_shape_however_k_is_cut(splits, tile, dtype):
    for out_features, in_features in [*SHAPES, (48, 520)]:
        for num_rows in sorted({1, tile.rows - 3, tile.rows}):
            x, weight, bias = drawn(num_rows, out_features, in_features, dtype)
            for maybe_bias in (bias, None):
                out = tiled.tiled(
                    x, weight, maybe_bias, gated=tile.gated, tile=tile, splits=min(splits, -(-in_features // 64))
                )
                exact = expected(x, weight, maybe_bias, gated=tile.gated)
                assert error(out, exact) < 2 * TOLERANCE[dtype], (num_rows, out_features, in_features)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 8, 9, 16, 17, 33, 64, 65, 128, 129])
def test_any_number_of_rows(num_rows, dtype):
    x, weight, bias = drawn(num_rows, 208, 96, dtype)
    prepared = CudaLinearWeight(ops.StoredWeight.dense(weight, bias))
    out = ops.linear(x, prepared)
    assert out.shape == (num_rows, 208)
    assert ops.gated_linear(x, prepared).shape == (num_rows, 104)
    if num_rows:
        assert error(out, expected(x, weight, bias, gated=False)) < TOLERANCE[dtype]
        assert error(ops.gated_linear(x, prepared), expected(x, weight, bias, gated=True)) < 2 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(("out_features", "in_features"), [(200, 96), (208, 90), (7, 33)])
def test_shapes_that_cannot_be_cut_go_to_cublas(out_features, in_features):
    for num_rows in (3, 40):
        x, weight, bias = drawn(num_rows, out_features, in_features, torch.bfloat16)
        prepared = CudaLinearWeight(ops.StoredWeight.dense(weight, bias))
        assert prepared.gated_matmul(x) is None
        assert error(prepared.matmul(x), expected(x, weight, bias, gated=False)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_a_tied_embedding_is_read_out_of_the_weight():
    _, weight, _ = drawn(1, 64, 96, torch.bfloat16)
    ids = torch.tensor([3, 63, 0], device="cuda")
    assert torch.equal(CudaLinearWeight(ops.StoredWeight.dense(weight)).rows(ids), weight[ids])


def test_what_is_chosen_exists_and_holds_all_rows():
    for num_rows, features, gated in itertools.product(range(1, few_rows.MAX_ROWS + 1), FEATURES, (False, True)):
        variant = few_rows.choose(num_rows, features, features, gated, 132)
        assert variant in few_rows.VARIANTS
        assert variant.tiles * 8 >= num_rows
        assert variant.shared_bytes <= SHARED_BYTES
    for num_rows, num_blocks, gated in itertools.product(
        range(1, tiled.MAX_ROWS + 1), (8, 132, 133, 1000), (False, True)
    ):
        tile = tiled.choose(num_rows, num_blocks, gated, 132)
        assert tile in tiled.TILES
        assert tile.rows >= num_rows
        assert tile.shared_bytes * (2 if num_blocks > 132 else 1) <= SHARED_BYTES


def test_k_is_cut_into_whole_stages_of_enough_work():
    for in_features, out_features in itertools.product(FEATURES, (16, 1024, 4096, 28672, 151_936)):
        splits = tiled.choose_splits(in_features, out_features, 100)
        assert splits == 1 or in_features // splits >= 256


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_an_activation_that_comes_with_its_product_is_no_further_off(activation):
    """Than one that is taken of rounded sums."""
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    for num_rows, out_features, in_features in ((300, 1024, 256), (513, 2080, 1056), (1, 192, 576)):
        x, weight, bias = drawn(num_rows, out_features, in_features, torch.bfloat16)
        ours = CudaLinearWeight(ops.StoredWeight.dense(weight, bias))
        exact = torch.nn.functional.gelu(expected(x, weight, bias, gated=False), approximate=approximate)
        apart = error(ops.activate(ours.matmul(x), activation), exact)
        assert error(ops.activated_linear(x, ours, activation), exact) < 1.05 * apart
        assert ours.activated_matmul(x, "relu") is None
