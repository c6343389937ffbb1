"""Gated delta rule along each sequence (for states and their indices see ops/scan)."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.attention.meta import AttentionMeta
from ops.delta import reference
from ops.delta.reference import DeltaHeads

_gated_delta_rule = backends.on_gpus(
    "gated_delta_rule", "ops.delta.triton_delta:gated_delta_rule", reference.gated_delta_rule
)


def gated_delta_rule(
    qkv: Tensor, ba: Tensor, heads: DeltaHeads, states: Tensor, state_indices: Tensor, meta: AttentionMeta
) -> Tensor:
    """Compute Gated DeltaNet's scan (Yang et al. 2024), [T, value heads * Dv]. Per token a head's state [Dk, Dv] is multiplied
    by exp(heads.a * softplus(a + dt_bias)), gains k (v - state^T k)^T * beta, and yields state^T q * Dk^-0.5; q, k normalised.

    qkv [T, 2 * key heads * Dk + value heads * Dv] contiguous; ba [T, 2 * value heads]: logits of beta, then a."""
    return _gated_delta_rule.runs[qkv.device, qkv.dtype](qkv, ba, heads, states, state_indices, meta)
