"""Linear layers on codes that are decoded before they are multiplied: every kernel against their worth in float64."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import torch

import ops
from ops.blocks import as_codes, as_w4
from ops.cuda.program import missing_for_hopper
from ops.gemm import pieces, triton_coded, triton_widen
from ops.gemm.coded import RowsLinearWeight, TiledLinearWeight, prepare
from ops.gemm.dequantize import dequantize
from ops.gemm.lay import fit_pieces, lay
from ops.gemm.reference import ReferenceLinearWeight
from ops.gemm.side_by_side import SideBySide
from ops.gemm.triton_coded import CodedTile
from ops.stored import BLOCKS, E2M1, FP4, NF4, Q4, Q8, TABLES, StoredWeight, WeightFormat, parts_of
from runtime.weights.dequantize import FORMATS
from runtime.weights.dequantize import dequantize as dequantize_blocks
from tests.ops.places import DEVICES, interpreted_once, places
from tests.ops.test_coded_linear import error, exact, to

ON_HOPPER = pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
HALVES = {
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}  # where blocks have half floats


def drawn(
    kind: WeightFormat, out_features: int, in_features: int, groups: int, how: str = "", seed: int = 0
) -> StoredWeight:
    """Every code. `how`: "mins", "super" (scales of scales) or both."""
    random = torch.Generator().manual_seed(seed)
    width = in_features if kind == Q8 else in_features // 2
    weight = torch.randint(256, (out_features, width), generator=random, dtype=torch.uint8)
    size = in_features**-0.5 / {Q8: 64, Q4: 8, E2M1: 3}.get(kind, 0.5)
    shape = out_features, groups
    scales = (torch.rand(shape, generator=random) * 1.5 + 0.5) * size
    tensors = {"weight": weight.view(torch.int8) if kind == Q8 else weight, "scales": scales}
    if "mins" in how:
        tensors["mins"] = torch.randn(shape, generator=random) * size
    if "super" in how:
        coarse = 1 if kind == E2M1 else max(1, groups // 2)
        fine = torch.rand(shape, generator=random) * 60 + 4
        tensors["scales"] = fine.to(torch.float8_e4m3fn if kind == E2M1 else torch.uint8)
        tensors["super_scales"] = (torch.rand(out_features, coarse, generator=random) + 0.5) * size / 32
        if "mins" in how:
            tensors["mins"] = torch.randint(64, shape, generator=random, dtype=torch.uint8)
            tensors["super_mins"] = torch.randn(out_features, coarse, generator=random) * size / 32
    return StoredWeight(kind, tensors)


def blocks(kind: str, out_features: int, in_features: int, seed: int = 0) -> StoredWeight:
    """Drawn bytes, with scales whose numbers are near those of weights."""
    random, block = torch.Generator().manual_seed(seed), BLOCKS[WeightFormat(kind)]
    raw = torch.randint(
        256, (out_features, in_features // block.columns, block.size), generator=random, dtype=torch.uint8
    )
    if kind == "MXFP4":
        raw[..., 0] = 118 + raw[..., 0] % 4
    for at in HALVES.get(kind, (0,) if kind != "MXFP4" else ()):
        halves = torch.randn((*raw.shape[:2], 1), generator=random) * {"Q6_K": 1e-5, "Q4_K": 1e-4, "Q5_K": 1e-4}.get(
            kind, 5e-3
        )
        raw[..., at : at + 2] = halves.half().view(torch.uint8)
    return StoredWeight.blocks(kind, raw.flatten(1))


def worth(stored: StoredWeight) -> torch.Tensor:
    """What blocks are worth, as numpy reads them."""
    block = FORMATS[str(stored.format)]
    out = np.empty((len(stored.weight), stored.weight.shape[1] // block.size * block.weights), np.float32)
    dequantize_blocks(stored.weight.numpy(), block, out)
    return torch.from_numpy(out)


def codes(stored: StoredWeight) -> triton_coded.Codes:
    return RowsLinearWeight(stored)._codes


def laid(parts: list[StoredWeight]) -> torch.Tensor:
    return lay(tuple(parts), in_pieces=True)["pieces"]


CASES = [
    (NF4, 192, 3, ""), (FP4, 192, 3, ""), (NF4, 256, 1, ""), (E2M1, 192, 6, ""), (E2M1, 192, 12, "super"),
    (Q4, 256, 8, "super mins"), (Q4, 192, 3, "mins"), (Q8, 256, 16, "super"), (Q8, 160, 5, "mins"),
]  # fmt: skip


def test_what_codes_are_worth():
    for kind in (NF4, FP4, E2M1):
        stored = drawn(kind, 4, 64, 2)
        values, numbers = dequantize(stored, torch.float64), torch.tensor(TABLES[kind], dtype=torch.float64)
        for row, column in ((0, 0), (3, 1), (2, 31), (1, 32), (0, 63)):
            code = int(stored.weight[row, column // 2]) >> 4 * (column % 2) & 15
            assert values[row, column] == numbers[code] * stored.tensors["scales"][row, column // 32].double()
    stored = drawn(Q4, 3, 64, 2, "super mins")
    code = float(stored.weight[2, 20] >> 4)
    scale = stored.tensors["scales"][2, 1].double() * stored.tensors["super_scales"][2, 0].double()
    minimum = stored.tensors["mins"][2, 1].double() * stored.tensors["super_mins"][2, 0].double()
    assert dequantize(stored, torch.float64)[2, 41] == code * scale - minimum


@pytest.mark.parametrize("kind", BLOCKS, ids=str)
def test_blocks_become_codes_that_are_worth_the_same(kind):
    stored = blocks(str(kind), 7, 768)
    wanted = worth(stored)
    assert torch.equal(dequantize(as_codes(stored)), wanted) or kind.name in (
        "Q4_K",
        "Q5_K",
    )  # whose products ggml rounds
    torch.testing.assert_close(dequantize(as_codes(stored)), wanted, rtol=1e-6, atol=1e-9)
    if kind.name == "Q4_0":
        assert torch.equal(dequantize(as_w4(stored)), wanted)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-6, 2e-3, 6e-3)))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_reads_all_codes(case, device, dtype, tolerance):
    kind, in_features, groups, how = case
    stored = to(drawn(kind, 72, in_features, groups, how), device)
    bias = torch.randn(72, device=device, dtype=dtype)
    for num_rows, given, splits in ((1, bias, 1), (17, None, 2)):
        x = torch.randn(num_rows, in_features, device=device, dtype=dtype)
        out = triton_coded.linear(x, codes(stored), given, tile=CodedTile(16, 32, 64, splits, 4, 2))
        assert error(out, exact(x, stored.with_bias(given))) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_are_widened(case, device):
    kind, in_features, groups, how = case
    stored = to(drawn(kind, 37, in_features, groups, how), device)
    torch.testing.assert_close(
        triton_widen.widen(codes(stored), torch.float32), dequantize(stored), rtol=1e-6, atol=1e-8
    )


def test_which_blocks_stay_on_a_gpu(monkeypatch):
    cuda = torch.device("cuda")
    q4_0, q4_k, q2_k = (WeightFormat(name) for name in ("Q4_0", "Q4_K", "Q2_K"))
    for device, decodes in (((9, 0), True), ((8, 9), False)):
        monkeypatch.setattr("ops.gemm.capability", lambda _, device=device: device)
        monkeypatch.setattr(sys.modules["ops.moe"], "capability", lambda _, device=device: device)
        assert ops.linear_refusal([q4_0], torch.bfloat16, cuda) is None
        for kinds in ([q4_k], [q4_0, q4_k], [NF4], [E2M1]):
            assert (ops.linear_refusal(kinds, torch.float16, cuda) is None) == decodes
        for kind in (q4_0, q4_k, NF4, E2M1):
            assert (ops.moe_refusal([kind], torch.bfloat16, cuda) is None) == decodes
    assert "in Q2_K" in str(ops.linear_refusal([q2_k], torch.bfloat16, cuda))
    assert "in one format" in str(ops.moe_refusal([q4_0, q4_k], torch.bfloat16, cuda))
    assert "plain numbers" in str(ops.embedding_refusal([q4_0], torch.bfloat16, cuda))
    assert "in float32" not in str(ops.linear_refusal([q4_0], torch.float16, cuda))


def test_blocks_of_four_bits_take_the_place_of_others():
    kept = prepare([blocks("Q4_0", rows, 256, seed=rows) for rows in (32, 16)])
    others = [blocks("Q4_0", rows, 256, seed=rows + 1) for rows in (32, 16)]
    assert kept.refill(others)
    for role, wanted in lay(tuple(map(as_w4, others)), in_pieces=False).items():
        assert torch.equal(kept._kept[role], wanted)
    with pytest.raises(ValueError, match="a weight in Q4_K where w4 is kept"):
        kept.refill(blocks("Q4_K", 48, 256))


TILED = [(NF4, 64, ""), (FP4, 128, ""), (E2M1, 32, ""), (Q4, 32, "super mins"), (Q4, 64, "mins"), (NF4, 0, ""),
         (Q8, 32, "mins"), (Q8, 16, "super"), (E2M1, 16, "super")]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "group", "how"), TILED, ids=str)
def test_pieces_hold_what_codes_are_worth(kind, group, how, device):
    for in_features in (256, 192) if not group or 192 % group == 0 else (256,):
        groups = in_features // group if group else 1
        parts = [to(drawn(kind, rows, in_features, groups, how, seed=rows), device) for rows in (48, 32)]
        assert fit_pieces(tuple(parts))
        wide = triton_widen.widen_pieces(laid(parts), 80, in_features, torch.float32, kind)
        wanted = torch.cat([dequantize(part) for part in parts])
        if kind in (Q4, Q8):  # a scale and a zero point in half floats
            assert error(wide, wanted.double()) < 1e-3
        else:
            torch.testing.assert_close(wide, wanted, rtol=1e-6, atol=1e-8)


def test_a_group_of_equal_numbers_has_no_zero_point_that_a_half_float_holds():
    tensors = {
        "scales": torch.tensor([[0.0, 1e-6, 0.01, 0.0]] * 16),
        "mins": torch.tensor([[0.25, -0.5, 0.04, 0.0]] * 16),
    }
    stored = StoredWeight(Q4, {"weight": torch.full((16, 64), 0x51, dtype=torch.uint8), **tensors})
    wide = triton_widen.widen_pieces(laid([stored]).to(DEVICE), 16, 128, torch.float32, Q4).cpu()
    torch.testing.assert_close(wide, dequantize(stored), rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_pieces():
    assert not fit_pieces((drawn(NF4, 32, 128, 8),))  # groups of 16
    assert not fit_pieces((drawn(NF4, 32, 128, 2), drawn(NF4, 32, 128, 1)))
    assert not fit_pieces((drawn(NF4, 8, 128, 2),))  # rows


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "group", "how"), TILED, ids=str)
def test_tiles_at_any_number_of_rows(kind, group, how, dtype):
    for out_features, in_features in ((208, 1152), (2112, 2880)):
        groups = in_features // group if group and in_features % group == 0 else 1
        stored = to(drawn(kind, out_features, in_features, groups, how), "cuda")
        bias = torch.randn(out_features, device="cuda", dtype=dtype)
        prepared = TiledLinearWeight(stored.with_bias(bias))
        for num_rows in (0, 1, 8, 9, 16, 33, 64, 65, 129, 257, 1400):
            x = torch.randn(num_rows, in_features, device="cuda", dtype=dtype)
            out = ops.linear(x, prepared)
            assert out.shape == (num_rows, out_features)
            if num_rows:
                wanted = exact(x, stored.with_bias(bias))
                assert error(out, wanted) < TOLERANCE[dtype], num_rows
                if pieces.can_gate(out_features):
                    gate, up = wanted.chunk(2, dim=-1)
                    gated = torch.nn.functional.silu(gate) * up
                    assert error(ops.gated_linear(x, prepared), gated) < 2 * TOLERANCE[dtype], num_rows
    other = to(drawn(kind, out_features, in_features, groups, how, seed=1), "cuda")
    assert prepared.refill(other)
    assert error(ops.linear(x, prepared), exact(x, other.with_bias(bias))) < TOLERANCE[dtype]


def test_what_is_not_written_alike_is_refused():
    one, other, rows = drawn(NF4, 16, 128, 2), drawn(FP4, 16, 128, 2), functools.partial(lay, in_pieces=False)
    with pytest.raises(ValueError, match="rows in fp4 and nf4 are not scaled alike"):
        rows((one, other))
    with pytest.raises(ValueError, match="not scaled alike"):
        rows((one, drawn(NF4, 16, 128, 1)))
    with pytest.raises(ValueError, match="96 columns in 2 groups of nf4"):
        rows((drawn(NF4, 16, 96, 2),))


def test_rows_in_several_formats_are_one_layer():
    parts = [drawn(NF4, 32, 128, 2), drawn(NF4, 16, 128, 2, seed=1), drawn(Q8, 16, 128, 1)]

    def dense(run):
        return ReferenceLinearWeight([StoredWeight.dense(dequantize(part)) for part in parts_of(run)])

    layer = SideBySide(parts, dense)
    x = torch.randn(3, 128)
    assert error(ops.linear(x, layer), torch.cat([exact(x, part) for part in parts], 1)) < 1e-6
    others = [StoredWeight.dense(torch.randn(len(part.weight), 128)) for part in parts]
    assert layer.refill(others)
    assert error(ops.linear(x, layer), torch.cat([x.double() @ part.weight.double().T for part in others], 1)) < 1e-6
    with pytest.raises(ValueError, match="2 parts where 3 are kept"):
        layer.refill(others[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", BLOCKS, ids=str)
def test_blocks_at_any_number_of_rows(kind, dtype):
    stored = blocks(str(kind), 208, 1280)
    numbers = StoredWeight.dense(worth(stored).double().cuda())
    bias = torch.randn(208, device="cuda", dtype=dtype)
    prepared = prepare(to(stored, "cuda").with_bias(bias))
    for num_rows in (0, 1, 5, 16, 17, 33, 64, 65, 128, 129, 300, 1025):
        x = torch.randn(num_rows, 1280, device="cuda", dtype=dtype)
        out, gated = ops.linear(x, prepared), ops.gated_linear(x, prepared)
        assert out.shape == (num_rows, 208)
        if num_rows:
            wanted = x.double() @ numbers.weight.T + bias.double()
            assert error(out, wanted) < TOLERANCE[dtype], num_rows
            gate, up = wanted.chunk(2, dim=-1)
            assert error(gated, torch.nn.functional.silu(gate) * up) < 2 * TOLERANCE[dtype], num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_at_any_number_of_rows(case):
    kind, in_features, groups, how = case
    parts = [to(drawn(kind, rows, in_features * 8, groups * 8, how, seed=rows), "cuda") for rows in (96, 48, 16)]
    prepared = RowsLinearWeight(parts)
    wanted_of = [dequantize(part, torch.float64) for part in parts]
    for num_rows in (1, 7, 16, 40, 100, 257):
        x = torch.randn(num_rows, in_features * 8, device="cuda", dtype=torch.bfloat16)
        assert error(ops.linear(x, prepared), x.double() @ torch.cat(wanted_of).T) < TOLERANCE[torch.bfloat16], num_rows
    others = [to(drawn(kind, rows, in_features * 8, groups * 8, how, seed=rows + 1), "cuda") for rows in (96, 48, 16)]
    assert prepared.refill(others)
    wanted = torch.cat([exact(x, part) for part in others], 1)
    assert error(ops.linear(x, prepared), wanted) < TOLERANCE[torch.bfloat16]
