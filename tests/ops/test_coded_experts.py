"""Experts in codes and scales: Triton's products against float64, and what does not go together."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.cuda.program import missing_for_hopper
from ops.gemm.dequantize import dequantize
from ops.moe import experts_coded
from ops.moe.coded import CodedExpertWeights
from ops.moe.triton_experts import mix
from ops.moe.triton_route import gather
from ops.stored import FP8, W4, W8, StoredWeight
from tests.ops.moe_case import Clamped, moe_case
from tests.ops.places import DEVICES, interpreted_once, places
from tests.ops.test_coded_linear import drawn, to

CASES = [(FP8, 1), (FP8, 3), (W8, 1), (W4, 1), (W4, 3)]


def coded(case, codes, groups, device, dtype, *, ordered=False) -> CodedExpertWeights:
    """The case's experts with drawn codes; the case then has their numbers."""
    experts = CodedExpertWeights(case.shape, dtype, torch.device(device))
    for half, weights in case.weights.items():
        for expert, weight in enumerate(weights):
            stored = drawn(codes, *weight.shape, groups, zeros=codes == W4, seed=expert)
            if ordered:
                order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(expert)).int()
                stored = StoredWeight(codes, {**stored.tensors, "order": order})
            weight.copy_(dequantize(stored, torch.float64))
            bias = case.biases[half][expert].to(device, dtype) if case.shape.bias else None
            experts.fill(half, expert, to(stored, device).with_bias(bias))
    return experts


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-5, 3e-3, 2e-2)))
@pytest.mark.parametrize(("codes", "groups"), CASES, ids=str)
def test_they_mix_as_their_numbers_say(codes, groups, device, dtype, tolerance):
    gated, clamped = ops.ExpertShape(3, 96, 192), ops.ExpertShape(4, 192, 96, True, Clamped(1.702, 7.0))
    for shape, num_tokens in ((gated, 9), (clamped, 1)):
        case = moe_case(num_tokens, shape, ops.Routing(2, renormalize=True), plus=True)
        experts = coded(case, codes, groups, device, dtype)
        inputs = case.inputs(dtype, device)
        choice = experts.choose(num_tokens, 2)
        plus = inputs["plus"]
        out = mix(experts, inputs["x"], inputs["logits"], case.routing, inputs["e_score_correction_bias"], plus, choice)
        expected = case.expected().to(device)
        assert (out.double() - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-5, 3e-3, 2e-2)))
def test_columns_in_an_order_of_their_own_meet_theirs(device, dtype, tolerance):
    case = moe_case(5, ops.ExpertShape(3, 128, 64), ops.Routing(2))
    experts = coded(case, W4, 2, device, dtype, ordered=True)
    inputs = case.inputs(dtype, device)
    out = mix(experts, inputs["x"], inputs["logits"], case.routing, None, inputs["plus"], experts.choose(5, 2))
    expected = case.expected().to(device)
    assert (out.double() - expected).norm() < tolerance * expected.norm()


def test_what_is_filled_in_must_go_together():
    shape = ops.ExpertShape(2, 128, 64)
    experts = CodedExpertWeights(shape, torch.bfloat16, torch.device("cpu"))
    experts.fill("down", 0, drawn(W4, 128, 64, 2))
    before = experts.nbytes
    experts.fill("down", 1, drawn(W4, 128, 64, 1))  # coarser groups become finer
    assert experts.nbytes == before
    with pytest.raises(ValueError, match="experts in fp8 where w4 are kept"):
        experts.fill("down", 1, drawn(FP8, 128, 64, 1))
    with pytest.raises(ValueError, match="weight has shape"):
        experts.fill("down", 1, drawn(W4, 64, 64, 1))
    order = StoredWeight(W4, {**drawn(W4, 128, 64, 2).tensors, "order": torch.arange(64).flip(0).int()})
    with pytest.raises(ValueError, match="either all experts"):
        experts.fill("down", 1, order)
    with pytest.raises(ValueError, match="no bias"):
        experts.fill("down", 1, StoredWeight(W4, {"bias": torch.zeros(128)}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_for_each_pair(device):
    x = torch.randn(5, 96, device=device)
    order = torch.randperm(15, device=device).int()
    assert torch.equal(gather(x, order, 3), x[(order // 3).long()])


def test_every_number_of_pairs_has_an_instance():
    for codes, groups in ((FP8, 1), (W8, 1), (W4, 1), (W4, 2), (W4, 4)):
        known = experts_coded.tiles(codes, groups, gated=True)
        assert all(each.shared_bytes + 4 * 512 <= 227 << 10 and each.stages >= 2 for each in known)
        for pairs in (0.1, 1, 6, 20, 70, 500):
            assert experts_coded.choose(codes, pairs, groups, gated=True) in known
    assert experts_coded.fits(W4, ops.ExpertShape(128, 2048, 768), 16, "gate_up")
    assert not experts_coded.fits(W4, ops.ExpertShape(4, 192, 96, True, Clamped(1.702, 7.0)), 1, "down")


@pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("codes", "group"), [(W4, 128), (W4, 64), (W4, 32), (FP8, 128), (FP8, 0), (W8, 0), (W8, 64)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_come_out_of_registers(codes, group, dtype):
    """Every instance, experts that nobody chose, and some whose pairs are more than a tile."""
    shape = ops.ExpertShape(24, 384, 256 if group == 128 else 192, True)
    for num_tokens, top_k in ((1, 2), (40, 4), (70, 4), (100, 8), (600, 8)):
        case = moe_case(num_tokens, shape, ops.Routing(top_k, renormalize=True), plus=True)
        experts = CodedExpertWeights(shape, dtype, torch.device("cuda"))
        for half, weights in case.weights.items():
            for expert, weight in enumerate(weights):
                groups = weight.shape[1] // group if group else 1
                stored = drawn(codes, *weight.shape, groups, zeros=codes == W4, seed=expert)
                weight.copy_(dequantize(stored, torch.float64))
                bias = case.biases[half][expert].to("cuda", dtype)
                experts.fill(half, expert, to(stored, "cuda").with_bias(bias))
        assert all(kept.codes is None for kept in experts._weights.values())  # in pieces, for registers
        inputs = case.inputs(dtype, "cuda")
        choice = experts.choose(num_tokens, top_k)
        out = mix(experts, inputs["x"], inputs["logits"], case.routing, None, inputs["plus"], choice)
        expected = case.expected().to("cuda")
        assert (out.double() - expected).norm() < 2e-2 * expected.norm(), (num_tokens, top_k)
