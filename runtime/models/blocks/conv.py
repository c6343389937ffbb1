"""The short convolution that recurrent layers begin with: each channel by itself, over the last few tokens."""

from __future__ import annotations

from torch import Tensor

import ops
from runtime.models.blocks.weights import Weights


class Convolution:
    """`name`: of a Conv1d in the weights. `silu`: taken of what it gives."""

    def __init__(self, name: str, weights: Weights, *, silu: bool) -> None:
        # from [channels, 1, conv_kernel]
        self._weight = weights.derive(f"{name}.weight", lambda weight: weight[:, 0].T.contiguous())
        self._bias = weights.tensors.get(f"{name}.bias")
        self._silu = silu

    def forward(self, x: Tensor, states: Tensor, state_indices: Tensor, attn_metadata: ops.AttentionMeta) -> Tensor:
        """x [T, channels], whose rows may be strided -> [T, channels], contiguous."""
        return ops.causal_conv(x, self._weight, self._bias, self._silu, states, state_indices, attn_metadata)
