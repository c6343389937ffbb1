"""Linear layers of sixteen bits: what they mean in float64, and the same bits whatever shares the call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import ops
from tests.ops.rounded_case import assert_bad_rows_stay_alone, assert_finite_at_any_size

TOKENS = [0, 1, 2, 3, 5, 6, 7, 12, 13, 18, 33, 130]
MOST = np.float32(8191)


@pytest.fixture(autouse=True)
def _native() -> None:
    pytest.importorskip("oneloop_native")


def rounded(x: Tensor, most: np.float32 = MOST) -> np.ndarray:
    """x [N, K] in blocks of 32, the largest of each `most`."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x.numpy()
    blocks = padded.reshape(len(x), -1, 32)
    scales = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-30))
    values = np.rint(blocks * (most / scales)).astype(np.float64) * (scales / most)
    return values.reshape(padded.shape)[:, : x.shape[1]]


def prepared(weight: Tensor, bias: Tensor | None = None) -> ops.LinearWeight:
    return ops.prepare_linear(ops.StoredWeight.int16(weight, bias))


@pytest.mark.parametrize(("n", "k"), [(48, 256), (37, 100), (1, 33), (130, 768)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_exact_but_for_the_rounding_of_what_is_multiplied(isa: str, n: int, k: int, dtype) -> None:
    weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n), torch.randn(130, k)
    w = prepared(weight, bias)
    assert (w.out_features, w.in_features) == (n, k)
    near, values = rounded(x), ops.embedding(torch.arange(n), w).double().numpy()
    expected, largest = near @ values.T + bias.double().numpy(), np.abs(near) @ np.abs(values).T + 1
    exact = x.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    for tokens in TOKENS:
        out = ops.linear(x[:tokens], w).numpy()
        assert out.shape == (tokens, n)
        assert (np.abs(out - expected[:tokens]) <= 2e-6 * largest[:tokens]).all()
        assert np.linalg.norm(out - exact[:tokens]) <= 2e-4 * np.linalg.norm(exact[:tokens])


def test_sums_of_the_largest_products_fit(isa: str) -> None:
    w = prepared(torch.full((37, 64), -3.0))
    assert torch.allclose(ops.linear(torch.full((7, 64), 5.0), w), torch.tensor(-960.0), rtol=1e-6)


def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it(isa: str) -> None:
    w, x = prepared(torch.randn(72, 1024), torch.randn(72)), torch.randn(700, 1024)
    together = ops.linear(x, w)
    for tokens in TOKENS:
        assert torch.equal(ops.linear(x[:tokens], w), together[:tokens])
    assert torch.equal(ops.linear(x[600:601], w), together[600:601])


def test_the_number_of_threads_does_not_change_a_bit(isa: str) -> None:
    import oneloop_native

    w, x = prepared(torch.randn(700, 512)), torch.randn(130, 512)
    results = []
    for threads in (1, 2, 5):
        oneloop_native.set_num_threads(threads)
        results.append([ops.linear(x, w), ops.linear(x[:1], w), ops.linear(x[:9], w)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_embedding_reads_the_rounded_rows(isa: str) -> None:
    weight = torch.randn(37, 100)
    ids = torch.tensor([0, 36, 3, 3, 17])
    apart = np.abs(ops.embedding(ids, prepared(weight)).numpy() - weight[ids].numpy())
    assert (apart <= 0.51 * weight.abs().max().item() / MOST).all()


def test_a_nan_or_infinity_stays_in_its_own_row(isa: str) -> None:
    assert_bad_rows_stay_alone(prepared(torch.randn(37, 256)))


def test_tiny_and_huge_activations_stay_finite(isa: str) -> None:
    assert_finite_at_any_size(prepared(torch.randn(37, 256)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_cannot_be_rounded_is_refused(bad: float) -> None:
    weight = torch.randn(4, 32)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match="cannot be rounded to sixteen bits"):
        prepared(weight)


def test_a_weight_of_zeros_gives_zeros(isa: str) -> None:
    assert (ops.linear(torch.randn(3, 64), prepared(torch.zeros(20, 64))) == 0).all()
