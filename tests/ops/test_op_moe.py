"""Mixture of experts: each rule of routing by hand, and the mix equal to asking every expert of every token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import ops
from ops.moe.reference import route
from tests.ops.moe_case import Clamped, moe_case
from tests.ops.test_op_block_linear import random_rows

SMALL = ops.ExpertShape(6, 24, 20)
CLAMPED = ops.ExpertShape(5, 17, 33, bias=True, activation=Clamped(1.702, 1.0))


def chosen(logits: list[float], routing: ops.Routing, correction: list[float] | None = None) -> dict[int, float]:
    """Expert to weight, of one token, in float64."""
    row = torch.tensor([logits], dtype=torch.float64)
    ids, weights = route(row, routing, None if correction is None else torch.tensor(correction, dtype=torch.float64))
    return dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))


def logs(*numbers: float) -> list[float]:
    return [math.log(number) for number in numbers]


def test_softmax_weights_are_shares_of_all_experts():
    assert chosen(logs(5, 1, 3, 1), ops.Routing(2)) == pytest.approx({0: 0.5, 2: 0.3})


def test_renormalized_weights_sum_to_one_and_are_scaled_last():
    assert chosen(logs(5, 1, 3, 1), ops.Routing(2, renormalize=True)) == pytest.approx({0: 0.625, 2: 0.375})
    scaled = ops.Routing(2, renormalize=True, scale=2.0)
    assert chosen(logs(5, 1, 3, 1), scaled) == pytest.approx({0: 1.25, 2: 0.75})


def test_sigmoid_scores_judge_each_expert_alone():
    assert chosen([0.0, math.log(3), -9.0], ops.Routing(2, "sigmoid")) == pytest.approx({1: 0.75, 0: 0.5})


def test_a_correction_chooses_but_does_not_weigh():
    routing = ops.Routing(1, "sigmoid")
    assert chosen([0.0, math.log(3)], routing, [0.3, 0.0]) == pytest.approx({0: 0.5})


def test_only_experts_of_the_best_groups_are_chosen():
    routing = ops.Routing(2, num_groups=2, top_groups=1)
    assert set(chosen(logs(8, 1, 7, 7), routing)) == {0, 1}
    by_two = ops.Routing(2, num_groups=2, top_groups=1, group_score="top-2 sum")
    assert set(chosen(logs(8, 1, 7, 7), by_two)) == {2, 3}


def test_sparsemixer_weighs_among_what_is_near_and_not_yet_taken():
    # Twice a jitter of 0.1: 10 and 9 are near each other, and so are 9 and 8; 8 and 10 are not quite.
    weights = chosen([10.0, 9.0, 7.9, 1.0], ops.Routing(2, "sparsemixer", jitter=0.1))
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1.1))
    assert weights == pytest.approx({0: first, 1: second})


@pytest.mark.parametrize(
    ("shape", "routing", "options"),
    [
        (SMALL, ops.Routing(2), {}),
        (SMALL, ops.Routing(6, renormalize=True), {"plus": True}),
        (SMALL, ops.Routing(3, "sigmoid", True, 2.5, 3, 2, "top-2 sum"), {"corrected": True, "plus": True}),
        (CLAMPED, ops.Routing(1), {}),
        (CLAMPED, ops.Routing(4, renormalize=True), {"plus": True}),
        (ops.ExpertShape(6, 24, 20, activation="relu2"), ops.Routing(2), {}),
        (ops.ExpertShape(6, 24, 20, bias=True, activation="relu2", gated=False), ops.Routing(2), {"plus": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 19])
def test_moe_is_the_weighted_sum_of_the_chosen_experts(kernel, num_tokens, shape, routing, options):
    case = moe_case(num_tokens, shape, routing, **options)
    experts = case.fill(ops.prepare_experts(shape, torch.float32, torch.device("cpu")), torch.float32)
    out = ops.moe(**case.inputs(torch.float32), experts=experts, routing=routing)
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_what_neighbours_among_all_give_is_a_part_of_the_sum(kernel, num, num_tokens):
    case = moe_case(num_tokens, replace(SMALL, bias=True), ops.Routing(3, renormalize=True))
    total = torch.zeros_like(case.x, dtype=torch.float32)
    for shape in case.parts(num):
        experts = case.fill_part(ops.prepare_experts(shape, torch.float32, torch.device("cpu")), torch.float32)
        total += ops.moe(**case.inputs(torch.float32), experts=experts, routing=case.routing)
    torch.testing.assert_close(total.double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_K", "MXFP4", "int8"])
def test_experts_may_stay_quantised(isa, kind, biased):
    case = moe_case(9, ops.ExpertShape(4, 256, 256, bias=biased), ops.Routing(2, renormalize=True), plus=True)
    experts = ops.prepare_experts(case.shape, torch.float32, torch.device("cpu"), [ops.WeightFormat(kind)])
    for half, weights in case.weights.items():
        for expert, weight in enumerate(weights):
            bias = case.biases[half][expert].float() if biased else None
            if kind == "int8":
                experts.fill(half, expert, ops.StoredWeight.int8(weight.float(), bias))
                continue
            rows, values = random_rows(kind, *weight.shape, seed=expert)
            experts.fill(half, expert, rows.with_bias(bias))
            weight.copy_(torch.from_numpy(values))
    out = ops.moe(**case.inputs(torch.float32), experts=experts, routing=case.routing)
    expected = case.expected()
    assert (out - expected).norm() < 0.02 * (expected - case.plus).norm()
    assert experts.nbytes < 0.4 * 4 * 3 * 256 * 256 * 4


def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it(isa):
    case = moe_case(70, ops.ExpertShape(16, 96, 40), ops.Routing(4, renormalize=True), plus=True)
    experts = case.fill(ops.prepare_experts(case.shape, torch.float32, torch.device("cpu")), torch.float32)
    inputs = case.inputs(torch.float32)
    together = ops.moe(**inputs, experts=experts, routing=case.routing)
    for start, end in ((0, 1), (13, 14), (5, 22), (40, 70)):
        some = {name: None if tensor is None else tensor[start:end] for name, tensor in inputs.items()}
        assert torch.equal(ops.moe(**some, experts=experts, routing=case.routing), together[start:end])


def test_a_nan_stays_with_its_token(kernel):
    case = moe_case(6, SMALL, ops.Routing(2, renormalize=True))
    experts = case.fill(ops.prepare_experts(SMALL, torch.float32, torch.device("cpu")), torch.float32)
    inputs = case.inputs(torch.float32)
    inputs["logits"][1] = torch.nan
    inputs["x"][4, 3] = torch.nan
    out = ops.moe(**inputs, experts=experts, routing=case.routing)
    assert out[[1, 4]].isnan().all()
    assert out[[0, 2, 3, 5]].isfinite().all()


def test_the_inputs_are_left_as_they_were(kernel):
    case = moe_case(5, SMALL, ops.Routing(2), plus=True)
    experts = case.fill(ops.prepare_experts(SMALL, torch.float32, torch.device("cpu")), torch.float32)
    inputs = case.inputs(torch.float32)
    ops.moe(**inputs, experts=experts, routing=case.routing)
    for name, tensor in case.inputs(torch.float32).items():
        assert tensor is None or torch.equal(inputs[name], tensor)


def test_bytes_are_those_of_all_matrices_and_biases():
    experts = ops.prepare_experts(CLAMPED, torch.bfloat16, torch.device("cpu"))
    assert experts.nbytes == 2 * 5 * (3 * 17 * 33 + 2 * 33 + 17)
