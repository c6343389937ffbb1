"""Causal convolution along each sequence in plain torch, per channel: a sum over the K weights of the kernel.

Any float dtype, any device; math in float32 at least. It reads the step on the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ops.attention.meta import AttentionMeta
from ops.scan.reference import walk


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    states: Tensor,
    state_indices: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    kernel, inputs = weight.to(wide), x.to(wide)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)

    def single(tokens: Tensor, state: Tensor) -> Tensor:
        seen = torch.cat([state.to(wide), inputs[tokens, None]], dim=1)
        out[tokens] = (seen * kernel).sum(1)
        return seen[:, 1:].to(state.dtype)

    def span(tokens: slice, state: Tensor) -> Tensor:
        seen = torch.cat([state.to(wide), inputs[tokens]])
        num_tokens = tokens.stop - tokens.start
        for tap, factors in enumerate(kernel):
            out[tokens] += seen[tap : tap + num_tokens] * factors
        return seen[num_tokens:].to(state.dtype)

    walk(states, state_indices, meta, single, span)
    if bias is not None:
        out += bias
    return (functional.silu(out) if silu else out).to(x.dtype)
