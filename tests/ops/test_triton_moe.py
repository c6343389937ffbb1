"""Triton's mixture of experts against the reference in float64: on the CPU by Triton's interpreter, on a GPU for real."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import ops
from ops.moe import reference
from ops.moe.triton_experts import TritonExpertWeights, mix
from ops.moe.triton_route import route
from ops.tuning import files
from ops.tuning.numbers import ExpertTiles, ProductTiles
from tests.ops.moe_case import Clamped, moe_case
from tests.ops.places import DEVICES, interpreted_once, places

PLACES = places(1e-5, 3e-3, 2e-2)
ROUTINGS = {
    "top 2 of 8, shares of the chosen": (8, ops.Routing(2, renormalize=True), False),
    "top 8 of 128": (128, ops.Routing(8), False),
    "top 3 of 7": (7, ops.Routing(3, scale=0.5), False),
    "all of 5": (5, ops.Routing(5), False),
    "3 of 8 groups of 20": (160, ops.Routing(6, num_groups=8, top_groups=3, scale=16.0), False),
    "4 of 8 groups of 32, by two, corrected": (256, ops.Routing(8, "sigmoid", True, 2.5, 8, 4, "top-2 sum"), True),
    "softmax, corrected": (64, ops.Routing(6, renormalize=True, min_sum=1e-12), True),
    "sparsemixer": (16, ops.Routing(2, "sparsemixer", jitter=0.05), False),
}


def by_pair(routed, num_tokens: int, top_k: int) -> torch.Tensor:
    """The expert of each pair, [T, top_k], read out of the sorted list; within an expert pairs must rise."""
    experts = torch.full((num_tokens * top_k,), -1)
    starts = routed.starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        pairs = routed.order[start:end].cpu().long()
        assert torch.equal(pairs, pairs.sort().values)
        experts[pairs] = expert
    return experts.view(num_tokens, top_k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65, 130])
@pytest.mark.parametrize("rule", ROUTINGS)
def test_routing_sorts_the_reference_s_choices_by_expert(rule, num_tokens, device):
    num_experts, routing, corrected = ROUTINGS[rule]
    random = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=random) * 2
    correction = torch.randn(num_experts, generator=random) / 4 if corrected else None
    ids, weights = reference.route(logits.double(), routing, None if correction is None else correction.double())
    routed = route(logits.to(device), routing, None if correction is None else correction.to(device))
    assert torch.equal(by_pair(routed, num_tokens, routing.top_k), ids)
    assert torch.equal(routed.chosen.experts.cpu().long(), ids)
    torch.testing.assert_close(routed.chosen.weights.cpu().double(), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("rule", ROUTINGS)
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_numbers_that_are_none_choose_as_many_experts_as_others_do(rule, bad, device):
    num_experts, routing, corrected = ROUTINGS[rule]
    logits = torch.randn(3, num_experts)
    expected = reference.route(logits[[0, 2]].double(), routing)[0]
    logits[1] = bad
    correction = torch.zeros(num_experts, device=device) if corrected else None
    experts = by_pair(route(logits.to(device), routing, correction), 3, routing.top_k)
    assert len(set(experts[1].tolist())) == routing.top_k
    assert experts[1].min() >= 0
    assert torch.equal(experts[[0, 2]], expected)


SHAPES = {
    "even": (ops.ExpertShape(8, 64, 32), ops.Routing(2, renormalize=True), {}),
    "odd": (ops.ExpertShape(5, 72, 40), ops.Routing(3), {"plus": True}),
    "odder, biased, clamped": (
        ops.ExpertShape(9, 37, 51, bias=True, activation=Clamped(1.702, 1.0)), ops.Routing(4), {"plus": True},
    ),
    "squared relu, ungated": (
        ops.ExpertShape(6, 40, 24, bias=True, activation="relu2", gated=False), ops.Routing(2), {"plus": True},
    ),
    "squared relu": (ops.ExpertShape(6, 40, 24, activation="relu2"), ops.Routing(2), {}),
    "groups": (ops.ExpertShape(12, 40, 24), ops.Routing(3, "sigmoid", True, 2.5, 4, 2, "top-2 sum"), {"corrected": True}),
}  # fmt: skip


def filled(case, dtype, device) -> TritonExpertWeights:
    return case.fill(TritonExpertWeights(case.shape, dtype, torch.device(device)), dtype, device)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_moe_matches_the_definition(shape, num_tokens, dtype, tolerance, device):
    expert_shape, routing, options = SHAPES[shape]
    case = moe_case(num_tokens, expert_shape, routing, **options)
    out = ops.moe(**case.inputs(dtype, device), experts=filled(case, dtype, device), routing=routing)
    assert out.dtype == dtype
    assert error(out, case.expected()) < tolerance


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_what_neighbours_among_all_give_is_a_part_of_the_sum(num_tokens, dtype, tolerance, device):
    expert_shape, routing, _ = SHAPES["squared relu, ungated"]
    case, total = moe_case(num_tokens, expert_shape, routing), 0.0
    for shape in case.parts(2):
        experts = case.fill_part(TritonExpertWeights(shape, dtype, torch.device(device)), dtype, device)
        part = ops.moe(**case.inputs(dtype, device), experts=experts, routing=routing)
        assert part.isfinite().all(), "what others are to write is not read"
        total += part.cpu().double()
    assert error(total, case.expected()) < tolerance


TILES = files.read("nvidia-h200").experts
ODD = ExpertTiles(1, ProductTiles(64, 16, 16, 4, 2), ProductTiles(16, 128, 32, 4, 2))
EVERY_CHOICE = [*TILES.half, *TILES.float32, ODD]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("choice", EVERY_CHOICE, ids=str)
def test_every_choice_of_kernels_gives_the_same_result(choice, dtype, tolerance, device):
    if device == "cuda" and dtype == torch.float32 and choice in TILES.half:
        pytest.skip("tiles for half precision do not fit shared memory in float32")
    case = moe_case(20, ops.ExpertShape(3, 136, 72), ops.Routing(2), plus=True)
    out = mix(filled(case, dtype, device), **case.inputs(dtype, device), routing=case.routing, choice=choice)
    assert error(out, case.expected()) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_experts_of_real_width_match_the_definition(num_tokens):
    case = moe_case(num_tokens, ops.ExpertShape(8, 2048, 768), ops.Routing(5, renormalize=True), plus=True)
    experts, inputs = filled(case, torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    for choice in TILES.half:
        assert error(mix(experts, **inputs, routing=case.routing, choice=choice), case.expected()) < 2e-2


@pytest.mark.parametrize("device", DEVICES)
def test_all_tokens_may_choose_the_same_experts(device):
    case = moe_case(40, ops.ExpertShape(32, 48, 16), ops.Routing(2, renormalize=True))
    case.logits[:] = case.logits[0]
    out = ops.moe(
        **case.inputs(torch.float32, device), experts=filled(case, torch.float32, device), routing=case.routing
    )
    assert error(out, case.expected()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_are_nothing_to_do(device):
    case = moe_case(0, ops.ExpertShape(4, 16, 16), ops.Routing(2))
    out = ops.moe(
        **case.inputs(torch.float32, device), experts=filled(case, torch.float32, device), routing=case.routing
    )
    assert out.shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 24])
def test_a_captured_graph_serves_any_routing(num_tokens):
    case = moe_case(num_tokens, ops.ExpertShape(16, 128, 64), ops.Routing(4, renormalize=True))
    experts, inputs = filled(case, torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    ops.moe(**inputs, experts=experts, routing=case.routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.moe(**inputs, experts=experts, routing=case.routing)
    for seed in range(1, 4):
        other = moe_case(num_tokens, case.shape, case.routing, seed=seed)
        case.x.copy_(other.x)
        case.logits.copy_(other.logits)
        for name, tensor in case.inputs(torch.bfloat16, "cuda").items():
            if tensor is not None:
                inputs[name].copy_(tensor)
        graph.replay()
        assert error(out, case.expected()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 300])
def test_the_same_step_gives_the_same_bits(num_tokens):
    case = moe_case(num_tokens, ops.ExpertShape(64, 256, 128), ops.Routing(8))
    experts, inputs = filled(case, torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    first = ops.moe(**inputs, experts=experts, routing=case.routing)
    assert all(torch.equal(first, ops.moe(**inputs, experts=experts, routing=case.routing)) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 24])
def test_kernels_that_start_before_others_end_read_nothing_too_early(num_tokens):
    case = moe_case(num_tokens, ops.ExpertShape(16, 1024, 768), ops.Routing(8, renormalize=True))
    experts, x = filled(case, torch.bfloat16, "cuda"), case.x.to("cuda", torch.bfloat16)
    logits = torch.randn(24, num_tokens, 16, device="cuda")

    def layer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.moe(x, logits, experts, case.routing), torch.ones_like(x[0]), 1e-6)

    expected = x
    for row in logits:
        expected = layer(expected, row)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for row in logits:
            out = layer(out, row)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, expected)
