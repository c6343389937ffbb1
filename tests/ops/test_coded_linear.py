"""Linear layers on weights in codes and scales: every kernel against what the codes are worth, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ops
from ops import native
from ops.activation.triton_activation import silu_mul
from ops.gemm import few_rows_coded, pieces, triton_coded, triton_round, triton_widen
from ops.gemm.blocks import as_blocks
from ops.gemm.coded import RowsLinearWeight
from ops.gemm.dequantize import MAX_FP8, codes_of, dequantize, round_to_fp8, round_to_w4
from ops.stored import FP8, W4, W8, StoredWeight, WeightFormat
from runtime.weights.dequantize import FORMATS
from runtime.weights.dequantize import dequantize as dequantize_blocks
from tests.ops.places import DEVICES, interpreted_once, places

NATIVE = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def drawn(
    codes: WeightFormat, out_features: int, in_features: int, groups: int, *, zeros: bool = False, seed: int = 0
) -> StoredWeight:
    """Every code, scales that differ by a factor of 4."""
    random = torch.Generator().manual_seed(seed)
    scales = (torch.rand(out_features, groups, generator=random) * 1.5 + 0.5) * in_features**-0.5
    if codes == W4:
        weight = torch.randint(256, (out_features, in_features // 2), generator=random, dtype=torch.uint8)
        tensors = {"weight": weight, "scales": (scales / 4).half().float()}
        if zeros:
            tensors["zeros"] = torch.randint(16, scales.shape, generator=random, dtype=torch.uint8)
        return StoredWeight(codes, tensors)
    weight = torch.randint(256, (out_features, in_features), generator=random, dtype=torch.uint8)
    if codes == W8:
        return StoredWeight(codes, {"weight": weight.view(torch.int8), "scales": scales / 64})
    weight[(weight & 127) == 127] = 0  # no NaN
    return StoredWeight(codes, {"weight": weight.view(torch.float8_e4m3fn), "scales": scales / 128})


def to(stored: StoredWeight, device: str) -> StoredWeight:
    return StoredWeight(stored.format, {role: each.to(device) for role, each in stored.tensors.items()})


def exact(x: torch.Tensor, stored: StoredWeight) -> torch.Tensor:
    out = x.double() @ dequantize(stored, torch.float64).T
    return out if stored.bias is None else out + stored.bias.double()


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("codes", [FP8, W8, W4], ids=str)
def test_what_codes_are_worth(codes):
    stored = drawn(codes, 5, 64, 2, zeros=True)
    values = dequantize(stored, torch.float64)
    codes_of = stored.weight
    for row, column in ((0, 0), (3, 1), (4, 31), (2, 32), (1, 63)):
        if codes == W4:
            code = float(codes_of[row, column // 2] >> (4 * (column % 2)) & 15) - float(
                stored.tensors["zeros"][row, column // 32]
            )
        else:
            code = float(codes_of[row, column].float())
        assert values[row, column] == code * float(stored.tensors["scales"][row, column // 32])


def test_columns_in_an_order_of_their_own_come_back_to_their_places():
    stored, order = drawn(W4, 4, 64, 2), torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    ordered = StoredWeight(W4, {**stored.tensors, "order": order})
    assert torch.equal(dequantize(ordered)[:, order.long()], dequantize(stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_to_fp8_is_to_nearest_by_row(dtype):
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight[3] = 0
    stored = round_to_fp8(StoredWeight.dense(weight))
    scales = stored.tensors["scales"].double()
    assert torch.equal(stored.weight.float().abs().amax(1) == MAX_FP8, torch.arange(7) != 3)
    # Four bits of mantissa with the hidden one: half a step is a sixteenth of the number; below 2^-6 steps are 2^-9.
    bound = (weight.double().abs() / 16).clamp(min=2.0**-10 * scales) * (1 + 1e-6)
    assert ((dequantize(stored, torch.float64) - weight.double()).abs() <= bound).all()
    with pytest.raises(ValueError, match="infinity or a NaN"):
        round_to_fp8(StoredWeight.dense(torch.full((2, 16), float("nan"))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32)])
def test_rounding_to_four_bits_is_to_nearest_by_group(columns, group, dtype):
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight[3] = 0
    stored = round_to_w4(StoredWeight.dense(weight))
    scales = stored.tensors["scales"].double()
    assert scales.shape == (7, columns // group)
    wanted = weight.double().unflatten(1, (-1, group)) / scales[:, :, None]
    lost = (dequantize(stored, torch.float64).unflatten(1, (-1, group)) / scales[:, :, None] - wanted).abs()
    assert (lost <= torch.where(wanted > 7.5, 1, 0.5) + 1e-5).all()
    assert (wanted.amin(2)[torch.arange(7) != 3] == -8).all()
    with pytest.raises(ValueError, match="infinity or a NaN"):
        round_to_w4(StoredWeight.dense(torch.full((2, 32), float("inf"))))
    with pytest.raises(ValueError, match="48 columns"):
        round_to_w4(StoredWeight.dense(torch.ones(2, 48)))


CASES = [(FP8, 1), (FP8, 3), (W8, 1), (W8, 3), (W4, 1), (W4, 3), (W4, 6)]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-6, 1e-3, 6e-3)))
@pytest.mark.parametrize(("codes", "groups"), CASES, ids=str)
def test_triton_reads_all_codes(codes, groups, device, dtype, tolerance):
    for out_features, in_features, zeros in ((72, 192, True), (40, 192, False)):
        stored = to(drawn(codes, out_features, in_features, groups, zeros=zeros), device)
        bias = torch.randn(out_features, device=device, dtype=dtype) if zeros else None
        kept = RowsLinearWeight(stored)._codes
        for num_rows in (1, 17):
            x = torch.randn(num_rows, in_features, device=device, dtype=dtype)
            out = triton_coded.linear(x, kept, bias)
            assert error(out, exact(x, stored.with_bias(bias))) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("codes", "groups"), [(FP8, 1), (FP8, 3), (W8, 1)], ids=str)
def test_rounded_rows_meet_codes(codes, groups, device):
    stored = to(drawn(codes, 72, 192, groups), device)
    x = torch.randn(20, 192, device=device)
    x[3] = 0
    if codes == FP8 and device == "cpu":  # the interpreter loses the carry of what is rounded up
        x = drawn(FP8, 20, 192, 1).weight.float()
        x[:, ::64] = MAX_FP8
    rounded, x_scales = triton_round.round_rows(x, codes, groups)
    back = (rounded.view(torch.float8_e4m3fn if codes == FP8 else torch.int8).double().view(20, groups, -1)
            * x_scales.t().double().unsqueeze(2)).flatten(1)  # fmt: skip
    steps = x_scales.t().double().repeat_interleave(192 // groups, 1) * (0.5 if codes == W8 else 2.0**-10)
    bound = steps if codes == W8 else steps.maximum(x.double().abs() / 16)
    assert ((back - x.double()).abs() <= bound * (1 + 1e-5)).all()
    out = triton_coded.linear(
        rounded, RowsLinearWeight(stored)._codes, None, x_scales=x_scales, out_dtype=torch.float32
    )
    # Hopper adds products of fp8 with some 14 bits.
    assert error(out, exact(back, stored)) < (2.0**-11 if codes == FP8 and device == "cuda" else 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("codes", "columns", "groups"), [(W8, 192, 1), (W8, 192, 3), (W8, 20000, 1), (FP8, 4224, 1)], ids=str
)
def test_gates_and_ups_are_rounded_as_what_they_make_would_be(codes, columns, groups, device):
    gate_up = torch.randn(5, 2 * columns, device=device).bfloat16()
    gate_up[3] = 0
    wanted, wanted_scales = triton_round.round_rows(silu_mul(gate_up), codes, groups)
    rounded, scales = triton_round.round_rows(gate_up, codes, groups, gated=True)
    assert torch.equal(rounded, wanted)
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_features", [192, 256])
def test_four_bits_are_widened(device, in_features):
    stored = to(drawn(W4, 37, in_features, 2, zeros=True), device)
    kept = RowsLinearWeight(stored)._codes
    assert torch.equal(triton_widen.widen(kept, torch.float32), dequantize(stored))


def test_every_shape_has_an_instance_or_says_that_it_has_none():
    assert few_rows_coded.segments_of(FP8, 4096, 1) == (0, 31)
    assert few_rows_coded.segments_of(FP8, 4096, 32) == (1, 1)
    assert few_rows_coded.segments_of(W4, 4096, 32) == (1, 0)
    assert few_rows_coded.segments_of(W4, 4096, 64) == (2, 0)
    assert few_rows_coded.segments_of(W4, 4096, 1) == (1, 0)
    assert few_rows_coded.segments_of(W4, 4096, 128) == (4, 0)
    assert few_rows_coded.segments_of(W4, 4096, 256) is None  # groups of 16
    assert few_rows_coded.segments_of(W4, 4096 + 64, 1) is None
    assert few_rows_coded.segments_of(W8, 4096, 32) == (1, 1)
    for codes in (FP8, W8, W4):
        known = few_rows_coded.variants(codes)
        for in_features in (128, 4096, 14336):
            for num_rows in (1, 8, 9, 16):
                chosen = few_rows_coded.choose(codes, 1, num_rows, in_features, 4096, True)
                assert chosen in known
                assert chosen.tiles * 8 >= num_rows
        assert max(each.shared_bytes for each in known) <= 227 << 10


def test_four_bits_get_smaller_blocks_where_slabs_are_more_than_large_ones_hold():
    for out_features, in_features, warps, queued in (
        (4096, 4096, 16, 1), (6144, 4096, 8, 1), (6144, 14336, 16, 1), (16384, 4096, 8, 2),
    ):  # fmt: skip
        chosen = few_rows_coded.choose(W4, 1, 1, in_features, out_features, False)
        assert (chosen.warps, chosen.batches) == (warps, queued)
    assert few_rows_coded.choose(FP8, 0, 1, 4096, 6144, False).warps == 16


def test_which_codes_are_taken_where():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for codes in (FP8, W8, W4):
        assert ops.linear_refusal([codes], torch.bfloat16, cuda) is None
        assert "it computes in bfloat16 or float16" in str(ops.linear_refusal([codes], torch.float32, cuda))
        refused = ops.linear_refusal([codes], torch.float32, cpu)
        assert str(codes) in str(refused) if codes == FP8 or native.missing else refused is None
    assert ops.linear_refusal([FP8, W4], torch.bfloat16, cuda) is None  # each by its own kernel
    assert "in one format" in str(ops.moe_refusal([FP8, W4], torch.bfloat16, cuda))
    assert "in nf3" in str(ops.moe_refusal([WeightFormat("nf3")], torch.bfloat16, cuda))
    assert "in nf3" in str(ops.linear_refusal([FP8, WeightFormat("nf3")], torch.bfloat16, cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("codes", [FP8, W8, W4], ids=str)
def test_every_stream_at_every_shape(codes, dtype):
    known = few_rows_coded.variants(codes)
    few_rows_coded.program(codes).compile_ahead([each.name for each in known], dtype, torch.device("cuda", 0))
    for variant in known:
        for out_features, in_features in ((192, 640), (2112, 1152), (128, 128)):  # K is never cut evenly
            unit = 128 if codes == W4 else 64
            groups = 1 if not variant.segments else in_features // unit * variant.segments
            stored = to(drawn(codes, out_features, in_features, groups, zeros=True), "cuda")
            kept = RowsLinearWeight(stored)._codes
            weight, scales = kept.weight, kept.scales
            if codes == W4:
                weight, scales = pieces.in_pieces(W4, codes_of(W4, stored.weight), scales), None
            for num_rows in sorted({1, 8 * variant.tiles - 3, 8 * variant.tiles}):
                x = torch.randn(num_rows, in_features, device="cuda", dtype=dtype)
                bias = torch.randn(out_features, device="cuda", dtype=dtype)
                how = {"gated": variant.gated, "variant": variant}
                out = few_rows_coded.few_rows(x, codes, weight, scales, bias, out_features, groups, **how)
                wanted = exact(x, stored.with_bias(bias))
                if variant.gated:
                    gate, up = wanted.chunk(2, dim=-1)
                    wanted = torch.nn.functional.silu(gate) * up
                assert error(out, wanted) < 2 * TOLERANCE[dtype], (variant, num_rows, out_features, in_features)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("codes", "groups"), [(FP8, 1), (FP8, 2), (W8, 1), (W4, 2), (W4, 4), (W4, 8), (FP8, 8)], ids=str
)
def test_any_number_of_rows(codes, groups, dtype):
    stored = to(drawn(codes, 208, 256, groups, zeros=True), "cuda")
    bias = torch.randn(208, device="cuda", dtype=dtype)
    prepared = RowsLinearWeight(stored.with_bias(bias))
    down = RowsLinearWeight(to(drawn(codes, 128, 104, 1), "cuda"))
    for num_rows in (0, 1, 5, 16, 17, 33, 64, 128, 129, 300, 1025, 2500):
        x = torch.randn(num_rows, 256, device="cuda", dtype=dtype)
        out, gated, mlp = ops.linear(x, prepared), ops.gated_linear(x, prepared), ops.gated_mlp(x, prepared, down)
        assert out.shape == (num_rows, 208)
        assert gated.shape == (num_rows, 104)
        assert mlp.shape == (num_rows, 128)
        if num_rows:
            wanted = exact(x, stored.with_bias(bias))
            # Rounding x to four bits of mantissa, or to eight bits of its largest, is an error of each product.
            rounds = codes != W4 and num_rows > few_rows_coded.MAX_ROWS
            bound = {FP8: 0.05, W8: 0.02}[codes] if rounds else TOLERANCE[dtype]
            assert error(out, wanted) < bound, num_rows
            gate, up = wanted.chunk(2, dim=-1)
            assert error(gated, torch.nn.functional.silu(gate) * up) < 2 * bound, num_rows
            assert error(mlp, ops.linear(gated, down)) < bound, num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1e4])
@pytest.mark.parametrize(("codes", "groups"), [(FP8, 1), (FP8, 8), (W4, 8)], ids=str)
def test_tiny_and_huge_activations_lose_nothing(codes, groups, size):
    """On the way numbers of fp8 are 2^120 too small."""
    stored = to(drawn(codes, 64, 1024, groups, zeros=True), "cuda")
    x = (torch.randn(3, 1024, device="cuda") * size).bfloat16()
    assert error(ops.linear(x, RowsLinearWeight(stored)), exact(x, stored)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_parts_are_stacked_and_refilled_where_they_lie():
    parts = [to(drawn(FP8, rows, 256, groups, seed=rows), "cuda") for rows, groups in ((64, 1), (32, 2), (16, 1))]
    prepared = RowsLinearWeight(parts)
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    wanted = torch.cat([exact(x, part) for part in parts], 1)
    assert error(ops.linear(x, prepared), wanted) < TOLERANCE[torch.bfloat16]
    others = [to(drawn(FP8, rows, 256, 1, seed=rows + 1), "cuda") for rows in (64, 32, 16)]
    assert prepared.refill(others)
    wanted = torch.cat([exact(x, part) for part in others], 1)
    assert error(ops.linear(x, prepared), wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("codes", "zeros", "kind"), [(W4, False, "Q4_0"), (W4, True, "Q4_1"), (W8, False, "Q8_0")], ids=str
)
def test_on_a_cpu_codes_become_blocks(codes, zeros, kind):
    stored = drawn(codes, 40, 256, 4, zeros=zeros)
    blocks = as_blocks(stored)
    assert str(blocks.format) == kind
    numbers = np.empty((40, 256), np.float32)
    dequantize_blocks(blocks.weight.numpy(), FORMATS[kind], numbers)
    wanted = dequantize(stored)
    step = stored.tensors["scales"].repeat_interleave(64, 1)
    # A half float is right to a 2048th: of the code times its step, and of its zero point times that.
    bound = (wanted.abs() + (15 * step if zeros else 0)) / 2048 * (2 if zeros else 1) + 1e-9
    assert ((torch.from_numpy(numbers) - wanted).abs() <= bound).all()


@pytest.mark.parametrize(
    "changes",
    [
        lambda stored: {"order": torch.arange(256).flip(0).int()},
        lambda stored: {"scales": stored.tensors["scales"] * 1e9},
        lambda stored: {"scales": torch.rand(40, 16) + 1},  # groups of 16
    ],
    ids=["order", "huge", "narrow"],
)
def test_what_no_block_holds_becomes_numbers(changes):
    stored = drawn(W4, 40, 256, 4)
    stored = StoredWeight(W4, {**stored.tensors, **changes(stored)})
    blocks = as_blocks(stored)
    assert str(blocks.format) == "float32"
    assert torch.equal(blocks.weight, dequantize(stored))


@NATIVE
def test_parts_in_codes_blocks_and_numbers_are_one_layer_on_a_cpu():
    parts = [drawn(W4, 32, 256, 2), drawn(W8, 16, 256, 1), StoredWeight.dense(torch.randn(16, 256) / 16)]
    x = torch.randn(6, 256)
    out = ops.linear(x, ops.prepare_linear(parts, torch.float32))
    wanted = torch.cat([exact(x, part) for part in parts], 1)
    assert error(out, wanted) < 0.01  # activations are rounded to eight bits
