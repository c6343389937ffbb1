"""Experts in codes that are decoded before they are multiplied, against float64, and what does not go together."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.blocks import as_codes
from ops.cuda.program import missing_for_hopper
from ops.gemm.dequantize import dequantize
from ops.moe.coded import CodedExpertWeights
from ops.moe.triton_experts import mix
from ops.stored import E2M1, FP4, NF4, Q4, Q8, StoredWeight
from tests.ops.moe_case import Clamped, moe_case
from tests.ops.places import interpreted_once, places
from tests.ops.test_coded_linear import to
from tests.ops.test_decoded_linear import blocks, drawn

ON_HOPPER = pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))
GATED, CLAMPED = ops.ExpertShape(3, 96, 192), ops.ExpertShape(4, 192, 96, True, Clamped(1.702, 7.0))
CASES = [
    (lambda *shape, seed: drawn(NF4, *shape, shape[1] // 32, seed=seed), GATED),
    (lambda *shape, seed: drawn(E2M1, *shape, shape[1] // 16, "super", seed), GATED),
    (lambda *shape, seed: blocks("MXFP4", *shape, seed), CLAMPED),
    (lambda *shape, seed: drawn(Q4, *shape, shape[1] // 32, "mins", seed), CLAMPED),
    (lambda *shape, seed: drawn(Q8, *shape, shape[1] // 16, "super", seed), GATED),
    (lambda *shape, seed: blocks("Q4_K", *shape, seed), ops.ExpertShape(3, 256, 256)),
]


def experts_of(case, make, device, dtype) -> CodedExpertWeights:
    """The case's experts so written; the case then has their numbers."""
    experts = CodedExpertWeights(case.shape, dtype, torch.device(device))
    for half, weights in case.weights.items():
        for expert, weight in enumerate(weights):
            stored = make(*weight.shape, seed=expert)
            weight.copy_(dequantize(as_codes(stored), torch.float64))
            bias = case.biases[half][expert].to(device, dtype) if case.shape.bias else None
            experts.fill(half, expert, to(stored, device).with_bias(bias))
    return experts


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-5, 3e-3, 2e-2)))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_they_mix_as_their_numbers_say(number, device, dtype, tolerance):
    make, shape = CASES[number]
    for num_tokens in (9,) if device == "cpu" else (1, 9, 40, 130, 700):
        case = moe_case(num_tokens, shape, ops.Routing(2, renormalize=True), plus=True)
        experts = experts_of(case, make, device, dtype)
        inputs = case.inputs(dtype, device)
        choice = experts.choose(num_tokens, 2)
        out = mix(
            experts,
            inputs["x"],
            inputs["logits"],
            case.routing,
            inputs["e_score_correction_bias"],
            inputs["plus"],
            choice,
        )
        expected = case.expected().to(device)
        assert (out.double() - expected).norm() < tolerance * expected.norm()


def test_what_is_filled_in_must_go_together():
    experts = CodedExpertWeights(ops.ExpertShape(2, 128, 64), torch.bfloat16, torch.device("cpu"))
    experts.fill("down", 0, drawn(NF4, 128, 64, 2))
    before = experts.nbytes
    experts.fill("down", 1, drawn(NF4, 128, 64, 2, seed=1))
    assert experts.nbytes == before
    with pytest.raises(ValueError, match="experts in fp4 where nf4 are kept"):
        experts.fill("down", 1, drawn(FP4, 128, 64, 2))
    with pytest.raises(ValueError, match="weight has shape"):
        experts.fill("down", 1, drawn(NF4, 64, 64, 2))
    with pytest.raises(ValueError, match="1 groups of columns where 2 are kept"):
        experts.fill("down", 1, drawn(NF4, 128, 64, 1))
    with pytest.raises(ValueError, match="no bias"):
        experts.fill("down", 1, StoredWeight(NF4, {"bias": torch.zeros(128)}))


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "group", "how"),
    [
        (E2M1, 32, ""),
        (E2M1, 16, "super"),
        (NF4, 64, ""),
        (FP4, 64, ""),
        (Q4, 32, "mins"),
        (Q8, 32, "mins"),
        (Q8, 16, "super"),
    ],
    ids=str,
)
def test_codes_come_out_of_registers(kind, group, how, dtype):
    for shape in (ops.ExpertShape(24, 384, 192), ops.ExpertShape(8, 320, 320, True, Clamped(1.702, 7.0))):
        for num_tokens, top_k in ((1, 2), (40, 4), (600, 8)):
            case = moe_case(num_tokens, shape, ops.Routing(top_k, renormalize=True), plus=True)
            experts = experts_of(
                case,
                lambda *size, seed: drawn(kind, *size, size[1] // group, how, seed),
                "cuda",
                dtype,
            )
            assert all(kept.codes is None for kept in experts._weights.values())
            inputs = case.inputs(dtype, "cuda")
            choice = experts.choose(num_tokens, top_k)
            out = mix(experts, inputs["x"], inputs["logits"], case.routing, None, inputs["plus"], choice)
            expected = case.expected().to("cuda")
            assert (out.double() - expected).norm() < 2e-2 * expected.norm(), (shape, num_tokens, top_k)
