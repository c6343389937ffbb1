"""Linear layers on CUDA, our own stream of the weight and cuBLAS behind one LinearWeight, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import ops
from ops.gemm.cuda import MOST_ROWS, VARIANTS, CudaLinearWeight, choose, few_rows

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SHAPES = [
    (192, 576),
    (1024, 2048),
    (96, 32),
    (2080, 1056),
]  # out, in: neither a power of two nor many multiples of anything


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
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_at_every_shape(variant, dtype):
    for out_features, in_features in SHAPES:
        for num_rows in sorted({1, 8 * variant.tiles - 3, 8 * variant.tiles}):
            x, weight, bias = drawn(num_rows, out_features, in_features, dtype)
            for maybe_bias in (bias, None):
                out = few_rows(x, weight, maybe_bias, gated=variant.gated, variant=variant)
                exact = expected(x, weight, maybe_bias, gated=variant.gated)
                assert error(out, exact) < TOLERANCE[dtype], (num_rows, out_features, in_features)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 8, 9, 31, 32, 33, 100])
def test_any_number_of_rows(num_rows, dtype):
    x, weight, bias = drawn(num_rows, 208, 96, dtype)
    prepared = CudaLinearWeight(weight, bias)
    out = ops.linear(x, prepared)
    assert out.shape == (num_rows, 208)
    assert ops.gated_linear(x, prepared).shape == (num_rows, 104)
    if num_rows:
        assert error(out, expected(x, weight, bias, gated=False)) < TOLERANCE[dtype]
        assert error(ops.gated_linear(x, prepared), expected(x, weight, bias, gated=True)) < 2 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(("out_features", "in_features"), [(200, 96), (208, 90), (7, 33)])
def test_shapes_that_the_stream_cannot_cut_go_to_cublas(out_features, in_features):
    x, weight, bias = drawn(3, out_features, in_features, torch.bfloat16)
    prepared = CudaLinearWeight(weight, bias)
    assert prepared.gated_matmul(x) is None
    assert error(prepared.matmul(x), expected(x, weight, bias, gated=False)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_a_tied_embedding_is_read_out_of_the_weight():
    _, weight, _ = drawn(1, 64, 96, torch.bfloat16)
    ids = torch.tensor([3, 63, 0], device="cuda")
    assert torch.equal(CudaLinearWeight(weight, None).rows(ids), weight[ids])


def test_the_variant_that_is_chosen_exists_and_holds_all_rows():
    for num_rows, features, gated in itertools.product(range(1, MOST_ROWS + 1), (32, 1024, 3072, 14336), (False, True)):
        variant = choose(num_rows, features, features, gated)
        assert variant in VARIANTS
        assert variant.tiles * 8 >= num_rows
        assert variant.shared_bytes <= 227 << 10  # of a block, on Hopper
