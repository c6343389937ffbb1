"""Linear layers: right to rounding, and the same bits whatever shares the call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ops

TOKENS = [0, 1, 2, 3, 5, 14, 15, 16, 17, 33, 64, 257]


def problem(n: int, k: int, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    return torch.randn(257, k), torch.randn(n, k), torch.randn(n) if bias else None


@pytest.mark.parametrize(("n", "k"), [(48, 64), (37, 70), (1, 1), (5, 8), (16, 1), (130, 1000)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_matches_float64(kernel: str, n: int, k: int, bias: bool) -> None:
    x, weight, b = problem(n, k, bias)
    w = ops.prepare_linear(ops.StoredWeight.dense(weight, b))
    assert (w.out_features, w.in_features) == (n, k)
    expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
    for tokens in TOKENS:
        out = ops.linear(x[:tokens], w)
        assert out.shape == (tokens, n)
        torch.testing.assert_close(out.double(), expected[:tokens], rtol=1e-4, atol=2e-5 * k**0.5)


@pytest.mark.parametrize(("n", "k"), [(48, 64), (37, 770), (200, 1537)])
def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it(isa: str, n: int, k: int) -> None:
    x, weight, bias = problem(n, k)
    w = ops.prepare_linear(ops.StoredWeight.dense(weight, bias))
    together = ops.linear(x, w)
    for tokens in TOKENS:
        assert torch.equal(ops.linear(x[:tokens], w), together[:tokens])
    assert torch.equal(ops.linear(x[100:101], w), together[100:101])


def test_the_number_of_threads_does_not_change_a_bit(isa: str) -> None:
    import oneloop_native

    x, weight, bias = problem(200, 1537)
    w = ops.prepare_linear(ops.StoredWeight.dense(weight, bias))
    results = []
    for threads in (1, 2, 5):
        oneloop_native.set_num_threads(threads)
        results.append(ops.linear(x, w))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_weights_and_inputs_may_be_views(kernel: str) -> None:
    weight, x = torch.randn(40, 96).t()[:33], torch.randn(9, 3, 80)[:, 1, :40]
    torch.testing.assert_close(
        ops.linear(x, ops.prepare_linear(ops.StoredWeight.dense(weight))), x @ weight.t(), rtol=1e-4, atol=1e-4
    )


def test_a_nan_or_infinity_stays_in_its_own_row(kernel: str) -> None:
    x, weight, bias = problem(37, 70)
    x[3, 5], x[4, 5] = float("nan"), float("inf")
    out = ops.linear(x[:6], ops.prepare_linear(ops.StoredWeight.dense(weight, bias)))
    assert out[3].isnan().all()
    assert not out[4].isfinite().any()
    assert out[[0, 1, 2, 5]].isfinite().all()


@pytest.mark.parametrize(("n", "k"), [(48, 64), (37, 70)])
def test_embedding_reads_rows_out_of_the_prepared_weight(kernel: str, n: int, k: int) -> None:
    _, weight, _ = problem(n, k)
    ids = torch.tensor([0, n - 1, 3, 3, 17, *range(n)])
    assert torch.equal(ops.embedding(ids, ops.prepare_linear(ops.StoredWeight.dense(weight))), weight[ids])
    assert torch.equal(ops.embedding(ids, weight), weight[ids])
    assert ops.embedding(ids[:0], ops.prepare_linear(ops.StoredWeight.dense(weight))).shape == (0, k)


def test_a_packed_weight_is_no_larger_than_the_original_plus_padding() -> None:
    assert ops.prepare_linear(ops.StoredWeight.dense(torch.randn(64, 10))).nbytes == 64 * 10 * 4
    assert ops.prepare_linear(ops.StoredWeight.dense(torch.randn(33, 10))).nbytes <= 48 * 10 * 4


def test_wrong_shapes_and_types_raise(isa: str) -> None:
    w = ops.prepare_linear(ops.StoredWeight.dense(torch.randn(37, 70)))
    with pytest.raises(ValueError, match=r"x has shape \[2, 71\], expected \[any, 70\]"):
        ops.linear(torch.randn(2, 71), w)
    with pytest.raises(ValueError, match="x has shape"):
        ops.linear(torch.randn(70), w)
    with pytest.raises(TypeError, match="x has an element type"):
        ops.linear(torch.randn(2, 70).double(), w)
    with pytest.raises(ValueError, match="x has gaps inside its rows"):
        ops.linear(torch.randn(70, 2).t(), w)
    with pytest.raises(ValueError, match="bias has shape"):
        ops.prepare_linear(ops.StoredWeight.dense(torch.randn(37, 70), torch.randn(36)))
    with pytest.raises(ValueError, match="ids holds 37"):
        ops.embedding(torch.tensor([1, 37]), w)
    with pytest.raises(ValueError, match="ids holds -1"):
        ops.embedding(torch.tensor([-1]), w)
    with pytest.raises(TypeError, match="ids is int32"):
        ops.embedding(torch.tensor([1], dtype=torch.int32), w)
