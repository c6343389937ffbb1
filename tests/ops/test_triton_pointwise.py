"""Triton's norms, activation and embedding against torch, by the interpreter on a CPU and for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from ops.activation import reference as activation_reference
from ops.activation import triton_activation
from ops.embedding.triton_embedding import embedding
from ops.norm import reference as norm_reference
from ops.norm import triton_norm
from tests.ops.places import DEVICES, places

PLACES = places(1e-6, 2e-3, 1e-2)
SHAPES = [(1, 64), (2, 576), (17, 1000), (65, 1024), (0, 64), (3, 5120)]


def random(shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(got, wanted) -> float:
    return 0.0 if not wanted.numel() else float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_match_the_reference(shape, dtype, tolerance, device):
    x, residual = random(shape, dtype, device), random(shape, dtype, device, 1)
    weight = random(shape[-1:], dtype, device, 2)
    wanted = norm_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(triton_norm.rms_norm(x, weight, 1e-5), wanted) < tolerance
    wanted_sum = residual.double()
    wanted = norm_reference.add_rms_norm(x.double(), wanted_sum, weight.double(), 1e-5)
    assert error(triton_norm.add_rms_norm(x, residual, weight, 1e-5), wanted) < tolerance
    assert error(residual, wanted_sum) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("parts", ["weight and bias", "weight", "neither"])
def test_layer_norms_match_the_reference(shape, dtype, tolerance, device, parts):
    x, residual = random(shape, dtype, device) + 3, random(shape, dtype, device, 1)
    weight = None if parts == "neither" else random(shape[-1:], dtype, device, 2)
    bias = random(shape[-1:], dtype, device, 3) if parts == "weight and bias" else None
    wanted = norm_reference.layer_norm(x.double(), weight, bias, 1e-5)
    assert error(triton_norm.layer_norm(x, weight, bias, 1e-5), wanted) < tolerance
    wanted_sum = residual.double()
    wanted = norm_reference.add_layer_norm(x.double(), wanted_sum, weight, bias, 1e-5)
    assert error(triton_norm.layer_norm_of_sum(x, residual, weight, bias, 1e-5), wanted) < tolerance
    assert error(triton_norm.add_layer_norm(x, residual, weight, bias, 1e-5), wanted) < tolerance
    assert error(residual, wanted_sum) < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_norm_weights_may_be_wider_than_what_they_multiply(device):
    x, weight = random((5, 64), torch.float16, device), random((64,), torch.float32, device, 2)
    out = triton_norm.rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.float16
    assert error(out, norm_reference.rms_norm(x.double(), weight.double(), 1e-5)) < 1e-3
    assert error(norm_reference.rms_norm(x, weight, 1e-5), out.double()) < 1e-3


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul_matches_the_reference(shape, dtype, tolerance, device):
    x = random(shape, dtype, device) * 4
    assert error(triton_activation.silu_mul(x), activation_reference.silu_mul(x.double())) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("activation", activation_reference.ACTIVATIONS)
def test_activations_match_the_reference(activation, dtype, tolerance, device):
    x = random((9, 1032), dtype, device) * 4
    wanted = activation_reference.activate(x.double(), activation)
    assert error(triton_activation.activate(x, activation), wanted) < tolerance
    wanted = activation_reference.gated(x.double(), activation)
    assert error(triton_activation.gated(x, activation), wanted) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (9, 1000), (0, 64), (3, 5120)])
def test_embedding_copies_rows(tokens, hidden, dtype, tolerance, device):
    table = random((50, hidden), dtype, device)
    ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(embedding(ids, table), table[ids])
