"""Weights: what blocks take theirs from when they are built, by the names that the spec gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor

import ops
from runtime.models.spec.decoder import DecoderSpec


class Weights(NamedTuple):
    """`linears`: prepared matrices by the names of `spec.linears()`. `experts`: by those of `spec.experts()`. `tensors`:
    everything else, by parameter."""

    linears: Mapping[str, ops.LinearWeight]
    tensors: Mapping[str, Tensor]
    experts: Mapping[str, ops.ExpertWeights]


class ExpertHalf(NamedTuple):
    """Where a matrix of one expert belongs."""

    experts: str
    half: Literal["gate_up", "down"]
    number: int


def expert_halves(spec: DecoderSpec) -> dict[str, ExpertHalf]:
    """By the names of the parameters."""
    found = {}
    for experts in spec.experts():
        for number in range(experts.num_experts):
            gate_up, down = experts.halves(number)
            found[f"{gate_up.name}.weight"] = ExpertHalf(experts.name, "gate_up", number)
            found[f"{down.name}.weight"] = ExpertHalf(experts.name, "down", number)
    return found
