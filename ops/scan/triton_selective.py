"""Mamba's scan in Triton: a program keeps the states of a few channels in registers over all tokens of its request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.meta import AttentionMeta
from ops.launch import overlap, wait_for_previous
from ops.scan.triton_common import request_span, softplus


@triton.jit
def _scan(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, gate_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr,
    seq_lens_ptr, x_stride, dt_stride, b_stride, c_stride, gate_stride, state_stride,
    CHANNELS: tl.constexpr, STATE: tl.constexpr, LANES: tl.constexpr, STATE_LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, LANES channels); a state is [CHANNELS, STATE].
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    col = tl.arange(0, STATE_LANES)
    in_lane, in_col = lane < CHANNELS, col < STATE
    inside = in_lane[:, None] & in_col[None, :]
    of_state = lane[:, None] * STATE + col[None, :]
    a = tl.load(a_ptr + of_state, mask=inside, other=0.0)
    d = tl.load(d_ptr + lane, mask=in_lane, other=0.0)
    wait_for_previous(PDL)
    state_index, start, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if state_index < 0:
        return
    at = states_ptr + state_index * state_stride + of_state
    state = tl.load(at, mask=tl.where(has_state, inside, False), other=0.0)
    for token in range(start, end):
        far = tl.cast(token, tl.int64)
        x = tl.load(x_ptr + far * x_stride + lane, mask=in_lane, other=0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + far * dt_stride + lane, mask=in_lane, other=0.0).to(tl.float32))
        b = tl.load(b_ptr + far * b_stride + col, mask=in_col, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + far * c_stride + col, mask=in_col, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + far * gate_stride + lane, mask=in_lane, other=0.0).to(tl.float32)
        state = state * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        out = (tl.sum(state * c[None, :], 1) + d * x) * gate / (1.0 + tl.exp(-gate))
        tl.store(out_ptr + far * CHANNELS + lane, out.to(out_ptr.dtype.element_ty), mask=in_lane)
    if start < end:
        tl.store(at, state, mask=inside)


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, gate: Tensor, states: Tensor, state_indices: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """Compute `ops.selective_scan`. Results of padding tokens are undefined."""
    (num_tokens, channels), state_size = x.shape, a.shape[1]
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    if num_tokens:
        by = tuning.of(x.device).recurrent
        _scan[(state_indices.shape[0], triton.cdiv(channels, by.selective_channels))](
            x, dt, b, c, a, d, gate, out, states, state_indices, meta.query_start_loc, meta.seq_lens, x.stride(0),
            dt.stride(0), b.stride(0), c.stride(0), gate.stride(0), states.stride(0), CHANNELS=channels,
            STATE=state_size, LANES=by.selective_channels, STATE_LANES=triton.next_power_of_2(state_size),
            num_warps=by.selective_warps,
            **overlap(x.device),
        )  # fmt: skip
    return out
