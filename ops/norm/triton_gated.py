"""RMS norm of groups with a gate, in Triton: one program per (token, group), one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous


@triton.jit
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, x_stride, gate_stride,
    SIZE: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x, gate, out [tokens, SIZE] in groups of GROUP; LANES the next power of two.
    token = tl.program_id(0).to(tl.int64)
    in_group = tl.arange(0, LANES)
    inside = in_group < GROUP
    lane = tl.program_id(1) * GROUP + in_group
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + lane, mask=inside, other=0.0).to(tl.float32)
    factor = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= factor
    result = x * tl.rsqrt(tl.sum(x * x, 0) / GROUP + eps) * weight
    if not GATE_FIRST:
        result *= factor
    tl.store(out_ptr + token * SIZE + lane, result.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool) -> Tensor:
    """Compute `ops.gated_rms_norm`."""
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    lanes = triton.next_power_of_2(group_size)
    if num_tokens:
        _gated_norm[(num_tokens, size // group_size)](
            x, gate, weight, out, eps, x.stride(0), gate.stride(0), SIZE=size, GROUP=group_size, LANES=lanes,
            GATE_FIRST=gate_first, num_warps=max(1, min(8, lanes // 512)), **overlap(x.device),
        )  # fmt: skip
    return out
