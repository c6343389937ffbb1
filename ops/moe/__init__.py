"""Mixture of experts: memory for the experts of a layer, and the weighted sum of each token's chosen experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ops import backends
from ops.gemm import coded as gemm_coded
from ops.gemm import native as gemm_native
from ops.gemm import reference as gemm_reference
from ops.moe import native, reference
from ops.moe.weights import ExpertShape, ExpertWeights, Routing
from ops.registry import USUAL, Kernel, Op, ShapeClass, capability
from ops.stored import WeightFormat


def _stacked_on_cuda(case: ShapeClass) -> str | None:
    return backends.on_cuda(case) or gemm_reference.supports(case)


_prepare_experts = Op(
    "moe",
    USUAL,
    [
        backends.native("moe", native.NativeExpertWeights, gemm_native.supports),
        backends.triton("moe", "ops.moe.triton_experts:TritonExpertWeights", _stacked_on_cuda),
        Kernel("moe", "coded", gemm_coded.supports_experts, "ops.moe.coded:CodedExpertWeights"),
        Kernel("moe", "reference", gemm_reference.supports, reference.StackedExpertWeights),
    ],
)


def prepare_experts(
    shape: ExpertShape, dtype: torch.dtype, device: torch.device, formats: Iterable[WeightFormat] = ()
) -> ExpertWeights:
    """Allocate the experts of one layer in the form that the chosen kernel reads; they are filled one by one. `formats`: formats of
    the weights, by default plain numbers of `dtype`. Raises NotImplementedError if no kernel supports them (`moe_refusal`)."""
    facts = (device, dtype, None, 0, tuple(formats))
    made: ExpertWeights = _prepare_experts.runs[facts](shape, dtype, device)
    return made


def count_experts(
    counts: Tensor, logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None, counted: Tensor
) -> None:
    """Add to counts [E] int64 the number of tokens that select each expert, by logits [T, E] as in `moe`. Only tokens with
    `counted` [T] bool True are included."""
    chosen, _ = reference.route(logits, routing, e_score_correction_bias)
    counts.scatter_add_(0, chosen.flatten(), counted[:, None].expand_as(chosen).flatten().to(counts.dtype))


def moe_refusal(formats: Iterable[WeightFormat], activations: torch.dtype, device: torch.device) -> str | None:
    """Return why `ExpertWeights.fill` does not support weights in these formats, for this activation dtype and device, or None."""
    formats = tuple(formats)
    if device.type == "cuda" and len(formats) > 1 and any(each.dtype is None for each in formats):
        return "all rows of an expert are read in one format"
    case = ShapeClass(device.type, activations, weight=formats, capability=capability(device))
    return _prepare_experts.refusal(case)


def moe(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    e_score_correction_bias: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """Return the mixture of experts [T, H] of x [T, H]. It is the weighted sum of the experts that `routing` selects for each token
    by router logits [T, E], plus `plus` [T, H], the output of a shared expert.

    e_score_correction_bias [E] float32 is added to the scores for the selection only (`Routing`). T may be any number. The
    selection stays on the device. NaN in a token's logits or x affects only that token."""
    return experts.mix(x, logits, routing, e_score_correction_bias, plus)
