"""Causal convolution along each sequence. Its state is the sequence's last inputs (for states and their indices see ops/scan)."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.attention.meta import AttentionMeta
from ops.conv import reference

_causal_conv = backends.on_gpus("causal_conv", "ops.conv.triton_conv:causal_conv", reference.causal_conv)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    states: Tensor,
    state_indices: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """Convolve x [T, C] with weight [K, C] along each sequence, add bias [C], apply silu if set; returns [T, C]. Token t is
    the sum of x[t - K + 1 + k] * weight[k]. States [K - 1, C] are a sequence's last inputs. Rows of x may be strided."""
    return _causal_conv.runs[x.device, x.dtype](x, weight, bias, silu, states, state_indices, meta)
