"""Mixtures of experts: room for a layer's experts, and the weighted sum of those that a token's router chose."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import backends
from ops.moe import native, reference
from ops.moe.routing import Routing
from ops.moe.weights import ExpertShape, ExpertWeights
from ops.registry import USUAL, Op

_prepare_experts = Op(
    "moe",
    USUAL,
    [
        backends.native("moe", native.NativeExpertWeights),
        backends.triton("moe", "ops.moe.triton_experts:TritonExpertWeights"),
        backends.reference("moe", reference.StackedExpertWeights),
    ],
)


def prepare_experts(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    """Room for the experts of one layer, each of which is then filled in, in the form that the chosen kernel reads."""
    return _prepare_experts.runs[device, dtype](shape, dtype, device)


def moe(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    correction: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """Mixture of experts: x [T, H] and its router's logits [T, E] -> [T, H], the weighted sum of the experts that `routing`
    chooses for each token, and `plus` [T, H] on top (a shared expert's result).

    correction [E] float32 is added to the scores where they choose (`Routing`). Any T; which experts are chosen stays on the
    device. A NaN in a token's logits or x stays with that token."""
    return experts.mix(x, logits, routing, correction, plus)
