"""Quantised linear layers: what they mean by the gguf package in float64, and the same bits whatever shares the call."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor
from torch.nn import functional

import ops
from ops.stored import BLOCKS
from tests.ops.rounded_case import assert_bad_rows_stay_alone, assert_finite_at_any_size

TYPES = sorted(kind.name for kind, block in BLOCKS.items() if block.on_cpu)
TOKENS = [0, 1, 2, 3, 4, 5, 7, 11, 12, 13, 14, 16, 25, 33, 64, 130]


@pytest.fixture(autouse=True)
def _native() -> None:
    pytest.importorskip("oneloop_native")


def random_rows(kind: str, n: int, k: int, seed: int = 0) -> tuple[ops.StoredWeight, np.ndarray]:
    """Rows of a type with every bit pattern of quants and sub-scales, and their values [n, k] float64 by the gguf package."""
    rng = np.random.default_rng(seed)
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (n, k // weights, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(115, 125, blocks.shape[:2])
    scales = {"MXFP4": [], "Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(kind, [0, 2])
    for at in scales:
        halves = (rng.standard_normal((n, k // weights, 1)) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    raw = blocks.reshape(n, -1)
    values = dequantize(raw, gguf.GGMLQuantizationType[kind])
    return ops.StoredWeight.blocks(kind, torch.from_numpy(raw)), values.astype(np.float64)


def rounded(x: Tensor) -> np.ndarray:
    """x [T, K] as the kernels see it: eight bits in blocks of 32, the largest of each 127."""
    blocks = x.numpy().reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    quants = np.rint(blocks * (np.float32(127) / largest))
    return (quants.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), [(48, 256), (37, 512), (1, 256), (130, 768)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_those_of_the_files_format(isa: str, kind: str, n: int, k: int, bias: bool) -> None:
    rows, values = random_rows(kind, n, k)
    b = torch.randn(n) if bias else None
    w = ops.prepare_linear(rows.with_bias(b))
    assert (w.out_features, w.in_features) == (n, k)
    x = torch.randn(130, k)
    expected = rounded(x) @ values.T + (0 if b is None else b.double().numpy())
    largest = np.abs(rounded(x)) @ np.abs(values).T + 1
    for tokens in TOKENS:
        out = ops.linear(x[:tokens], w).numpy()
        assert out.shape == (tokens, n)
        assert (np.abs(out - expected[:tokens]) <= 1e-6 * largest[:tokens]).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rounding_activations_costs_less_than_one_percent(kind: str) -> None:
    weight = np.random.default_rng(1).standard_normal((64, 512), np.float32)
    raw = quantize(weight, gguf.GGMLQuantizationType[kind])
    values = dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float64)
    x = torch.randn(200, 512)
    out = ops.linear(x, ops.prepare_linear(ops.StoredWeight.blocks(kind, torch.from_numpy(raw)))).numpy()
    exact = x.double().numpy() @ values.T
    assert np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean()) < 0.01


@pytest.mark.parametrize("kind", TYPES)
def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it(isa: str, kind: str) -> None:
    w = ops.prepare_linear(random_rows(kind, 72, 1024)[0].with_bias(torch.randn(72)))
    x = torch.randn(130, 1024)
    together = ops.linear(x, w)
    for tokens in TOKENS:
        assert torch.equal(ops.linear(x[:tokens], w), together[:tokens])
    assert torch.equal(ops.linear(x[100:101], w), together[100:101])


def test_the_number_of_threads_does_not_change_a_bit(isa: str) -> None:
    import oneloop_native

    w = ops.prepare_linear(random_rows("Q4_1", 700, 512)[0])
    x = torch.randn(130, 512)
    results = []
    for threads in (1, 2, 5):
        oneloop_native.set_num_threads(threads)
        results.append([ops.linear(x, w), ops.linear(x[:1], w), ops.linear(x[:9], w)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_reads_rows_bit_for_bit_as_the_gguf_package_does(isa: str, kind: str) -> None:
    rows, values = random_rows(kind, 37, 512)
    ids = torch.tensor([0, 36, 3, 3, 17, *range(37)])
    out = ops.embedding(ids, ops.prepare_linear(rows))
    assert np.array_equal(out.numpy(), values[ids].astype(np.float32))


def test_parts_of_different_types_are_one_layer(isa: str) -> None:
    parts = [
        random_rows(kind, n, 256, seed) for seed, (kind, n) in enumerate([("Q4_K", 48), ("Q4_K", 5), ("Q6_K", 19)])
    ]
    bias = torch.randn(72)
    w = ops.prepare_linear([rows.with_bias(b) for (rows, _), b in zip(parts, bias.split([48, 5, 19]), strict=True)])
    x = torch.randn(6, 256)
    apart = torch.cat([ops.linear(x, ops.prepare_linear(rows)) for rows, _ in parts], 1) + bias
    assert torch.equal(ops.linear(x, w), apart)
    values = np.concatenate([values for _, values in parts])
    ids = torch.tensor([0, 47, 48, 52, 53, 71])
    assert np.array_equal(ops.embedding(ids, w).numpy(), values[ids].astype(np.float32))


def test_a_nan_or_infinity_stays_in_its_own_row(isa: str) -> None:
    for kind in TYPES:
        assert_bad_rows_stay_alone(ops.prepare_linear(random_rows(kind, 37, 256)[0]))


def test_tiny_and_huge_activations_stay_finite(isa: str) -> None:
    assert_finite_at_any_size(ops.prepare_linear(random_rows("Q4_1", 37, 256)[0]))


def test_a_packed_weight_takes_little_more_than_its_file() -> None:
    for kind in TYPES:
        rows, _ = random_rows(kind, 64, 1024)
        widened = 22 / 17 if kind == "MXFP4" else 1
        assert ops.prepare_linear(rows).nbytes <= 1.05 * widened * rows.weight.nbytes


def test_mxfp4_scales_beyond_half_precision_are_refused_or_zero() -> None:
    rows, _ = random_rows("MXFP4", 16, 32)
    rows.weight[:, 0] = 128 - 25
    assert not ops.embedding(torch.arange(16), ops.prepare_linear(rows)).any()
    rows.weight[3, 0] = 128 + 16
    with pytest.raises(ValueError, match="scale of 2"):
        ops.prepare_linear(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (37, 70), (1, 1)])
def test_int8_rounds_each_block_of_a_row_to_its_largest(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n), torch.randn(9, k)
    w = ops.prepare_linear(ops.StoredWeight.int8(weight, bias))
    back = ops.embedding(torch.arange(n), w)
    padded = functional.pad(weight.float(), (0, -k % 32)).view(n, -1, 32)
    step = (padded.abs().amax(-1, keepdim=True) / 127).expand_as(padded).reshape(n, -1)[:, :k]
    assert ((back - weight.float()).abs() <= 0.52 * step).all()
    exact = functional.linear(x.double(), weight.double(), bias.double())
    spread = (x.abs().double() @ weight.abs().double().t()) + bias.abs()
    assert ((ops.linear(x, w) - exact).abs() <= 0.02 * spread).all()


def test_int8_takes_weights_of_any_size_but_no_nan() -> None:
    for size in (1e-9, 1e-5, 1e5):
        weight = torch.randn(20, 64) * size
        back = ops.embedding(torch.arange(20), ops.prepare_linear(ops.StoredWeight.int8(weight)))
        assert (back - weight).abs().max() <= 0.01 * weight.abs().max() + 1e-7
    for bad in (float("nan"), float("inf"), 1e30):
        with pytest.raises(ValueError, match="eight bits"):
            ops.prepare_linear(ops.StoredWeight.int8(torch.full((3, 40), bad)))


def test_wrong_shapes_and_types_raise() -> None:
    rows, _ = random_rows("Q4_0", 8, 256)
    w = ops.prepare_linear(rows)
    with pytest.raises(ValueError, match=r"x has shape \[2, 255\], expected \[any, 256\]"):
        ops.linear(torch.randn(2, 255), w)
    with pytest.raises(NotImplementedError, match="it reads no weights in Q2_K"):
        ops.prepare_linear(ops.StoredWeight.blocks("Q2_K", rows.weight))
    with pytest.raises(ValueError, match="raw has rows of 143 bytes, not of whole blocks of 18"):
        ops.prepare_linear(ops.StoredWeight.blocks("Q4_0", rows.weight[:, :-1].contiguous()))
    with pytest.raises(TypeError, match="raw is float32"):
        ops.prepare_linear(ops.StoredWeight.blocks("Q4_0", torch.zeros(4, 18)))
    with pytest.raises(ValueError, match="bias has shape"):
        ops.prepare_linear(rows.with_bias(torch.randn(7)))
    with pytest.raises(ValueError, match="parts of 256 and 512 inputs"):
        ops.prepare_linear([rows, random_rows("Q4_1", 8, 512)[0]])
    with pytest.raises(ValueError, match="ids holds 8"):
        ops.embedding(torch.tensor([8]), w)


def test_references_read_no_blocks_and_say_so() -> None:
    blocks, plain = [ops.WeightFormat("Q4_1")], [ops.WeightFormat("float32")]
    cpu = torch.device("cpu")
    assert ops.linear_refusal(blocks, torch.float32, cpu) is ops.moe_refusal(blocks, torch.float32, cpu) is None
    assert "Q4_1" in str(ops.linear_refusal(blocks, torch.float32, torch.device("cuda")))
    ops.force("reference")
    try:
        why = "it multiplies plain numbers of the activations' dtype, not Q4_1"
        assert ops.linear_refusal(blocks, torch.float32, cpu) == ops.moe_refusal(blocks, torch.float32, cpu) == why
        assert ops.linear_refusal(plain, torch.float32, cpu) is None
        with pytest.raises(NotImplementedError, match="float32 on cpu, weights in Q4_1"):
            ops.prepare_linear(random_rows("Q4_1", 8, 256)[0])
    finally:
        ops.force(None)


def test_plain_rows_and_blocks_may_be_one_layer(isa: str) -> None:
    rows = random_rows("Q4_1", 32, 256)[0]
    weight, x = torch.randn(20, 256), torch.randn(5, 256)
    w = ops.prepare_linear([rows, ops.StoredWeight.dense(weight)], torch.float32)
    apart = [ops.linear(x, ops.prepare_linear(part, torch.float32)) for part in (rows, ops.StoredWeight.dense(weight))]
    assert torch.equal(ops.linear(x, w), torch.cat(apart, 1))
