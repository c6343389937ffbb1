"""Adapters of experts as a device adds them, against the definition in float64: on the CPU by Triton's interpreter, on a GPU for
real."""

from __future__ import annotations

import itertools

import pytest
import torch

import ops
from ops.lora.slot_memory import ExpertSlots
from ops.moe.triton_experts import TritonExpertWeights
from ops.moe.weights import ExpertShares
from tests.ops.moe_case import Clamped, moe_case
from tests.ops.places import interpreted_once, places

NUM_SLOTS, RANK = 3, 5
SHAPES = {
    "gated": (ops.ExpertShape(5, 72, 40), ops.Routing(3)),
    "biased, clamped": (ops.ExpertShape(4, 37, 51, bias=True, activation=Clamped(1.702, 1.0)), ops.Routing(2)),
    "ungated": (ops.ExpertShape(3, 40, 24, activation="relu2", gated=False), ops.Routing(2)),
}


class Adapters:
    """Random ones for some halves of some experts in some slots, as `Beside` and as differences of weights."""

    def __init__(self, shape: ops.ExpertShape, dtype: torch.dtype, device: str, tokens: torch.Tensor) -> None:
        random = torch.Generator().manual_seed(8)
        self.tokens = tokens.to(device)
        self.deltas: dict = {}
        self.slots: dict = {}
        sizes, each = {}, {}
        for half in ("gate_up", "down"):
            rows, columns = shape.matrix(half)
            parts = (rows // 2, rows // 2) if half == "gate_up" and shape.gated else (rows,)
            for expert in range(shape.num_experts):
                lora = ops.LoraShape(rows, columns, parts, NUM_SLOTS, RANK)
                each[half, expert] = ExpertSlots(lora, dtype, torch.device(device))
            sizes[half] = -(-each[half, 0].slot_bytes // 256) * 256
        memory = torch.zeros(NUM_SLOTS, sum(sizes.values()) * shape.num_experts, dtype=torch.uint8, device=device)
        place = 0
        for expert in range(shape.num_experts):
            for half in ("gate_up", "down"):
                own = each[half, expert]
                own.bind(memory[:, place : place + own.slot_bytes])
                place += sizes[half]
        self.stride = sum(sizes.values())
        for (half, expert), own in each.items():
            for slot in range(NUM_SLOTS):
                if (slot + expert) % 3 == 2:
                    continue  # which leaves this matrix as it is
                start = own.shape.parts[0] if len(own.shape.parts) == 2 and slot == 1 else 0  # of ups alone
                rows = own.shape.out_features - start if slot else own.shape.parts[0]
                a = (torch.randn(RANK, own.shape.in_features, generator=random) / 4).to(dtype)
                b = (torch.randn(rows, RANK, generator=random) / 4).to(dtype)
                own.put(slot, own.prepared([ops.LoraPart(start, a, b, 0.5)]))
                delta = torch.zeros(own.shape.out_features, own.shape.in_features, dtype=torch.float64)
                delta[start : start + rows] = 0.5 * b.double() @ a.double()
                self.deltas[half, expert, slot] = delta
            self.slots.setdefault(half, own.slots if expert == 0 else None)

    def shares(self, half: str) -> ExpertShares:
        return ExpertShares(self.tokens, *self.slots[half], self.stride)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(places(1e-5, 4e-3, 3e-2)))
@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pair_takes_what_its_token_s_adapter_says_of_its_expert(shape, num_tokens, dtype, tolerance, device):
    expert_shape, routing = SHAPES[shape]
    case = moe_case(num_tokens, expert_shape, routing)
    tokens = torch.tensor([(number % (NUM_SLOTS + 1)) - (num_tokens > 1) for number in range(num_tokens)])
    experts = case.fill(TritonExpertWeights(expert_shape, dtype, torch.device(device)), dtype, device)
    beside = Adapters(expert_shape, dtype, device, tokens.int())
    inputs = case.inputs(dtype, device)
    out = experts.mix(inputs["x"], inputs["logits"], routing, None, None, beside).cpu().double()
    plain = case.weights
    for token, slot in enumerate(tokens.tolist()):
        one = moe_case(num_tokens, expert_shape, routing)
        for half, expert in itertools.product(plain, range(expert_shape.num_experts)):
            delta = beside.deltas.get((half, expert, slot))
            if delta is not None:
                one.weights[half][expert] += delta
        expected = one.expected()[token]
        assert (out[token] - expected).norm() <= tolerance * expected.norm()
        if (token + slot) % 2 == 0 and slot >= 0:
            assert (case.expected()[token] - expected).norm() > 3 * tolerance * expected.norm()  # they do change it
