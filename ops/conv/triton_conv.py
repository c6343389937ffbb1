"""Causal convolution in Triton. Requests of one token need one pass over their states. For longer requests, one kernel
computes all outputs, and the next one replaces every state, so nothing is overwritten before it is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.meta import AttentionMeta
from ops.launch import overlap, wait_for_previous
from ops.scan.triton_common import request_span


@triton.jit
def _finish(total, bias_ptr, lane, inside, SILU: tl.constexpr):
    if bias_ptr is not None:
        total += tl.load(bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _one_token(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, x_stride, state_stride,
    CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr, SILU: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, LANES channels). x and out [tokens, CHANNELS], states [*, KERNEL_SIZE - 1, CHANNELS].
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < CHANNELS
    wait_for_previous(PDL)
    state_index, start, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if (state_index < 0) | (start == end):
        return
    state = states_ptr + state_index * state_stride + lane
    total = tl.zeros((LANES,), tl.float32)
    for tap in tl.static_range(KERNEL_SIZE - 1):
        seen = tl.load(state + tap * CHANNELS, mask=tl.where(has_state, inside, False), other=0.0)
        total += seen * tl.load(weight_ptr + tap * CHANNELS + lane, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(state + (tap - 1) * CHANNELS, seen, mask=inside)
    new = tl.load(x_ptr + start.to(tl.int64) * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    total += new * tl.load(weight_ptr + (KERNEL_SIZE - 1) * CHANNELS + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(state + (KERNEL_SIZE - 2) * CHANNELS, new, mask=inside)
    total = _finish(total, bias_ptr, lane, inside, SILU)
    tl.store(out_ptr + start.to(tl.int64) * CHANNELS + lane, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "num_halvings"])  # one program for all captured steps
def _outputs(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, x_stride, state_stride,
    num_tokens, num_requests, num_halvings,
    CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program per (TOKENS tokens, LANES channels).
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lane = (tl.program_id(1) * LANES + tl.arange(0, LANES))[None, :]
    inside = lane < CHANNELS
    wait_for_previous(PDL)
    request = tl.zeros((TOKENS,), tl.int32)  # last request that begins at or before the token
    for step in range(num_halvings):
        later = request + (1 << (num_halvings - 1 - step))
        begin = tl.load(query_start_loc_ptr + later, mask=later < num_requests, other=2147483647)
        request = tl.where(begin <= token, later, request)
    state_index = tl.load(state_indices_ptr + request)
    start = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1)
    is_token = (token < end) & (token < num_tokens) & (state_index >= 0)
    has_state = is_token & (tl.load(seq_lens_ptr + request) > end - start)
    state = states_ptr + state_index * state_stride
    total = tl.zeros((TOKENS, LANES), tl.float32)
    for tap in tl.static_range(KERNEL_SIZE):
        source = token - (KERNEL_SIZE - 1 - tap)
        here = is_token & (source >= start)
        seen = tl.load(
            x_ptr + source.to(tl.int64)[:, None] * x_stride + lane, mask=here[:, None] & inside, other=0.0
        ).to(tl.float32)
        before = has_state & (source < start)
        row = tl.where(before, KERNEL_SIZE - 1 + source - start, 0)
        seen += tl.load(state[:, None] + row[:, None] * CHANNELS + lane, mask=before[:, None] & inside, other=0.0)
        total += seen * tl.load(weight_ptr + tap * CHANNELS + lane, mask=inside, other=0.0).to(tl.float32)
    total = _finish(total, bias_ptr, lane, inside, SILU)
    at = out_ptr + token.to(tl.int64)[:, None] * CHANNELS + lane
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & inside)


@triton.jit
def _update_states(
    x_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, x_stride, state_stride,
    CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, LANES channels): rows move up by as many tokens as came, in order, so each is read before it is
    # written; one thread keeps its channel throughout.
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < CHANNELS
    wait_for_previous(PDL)
    state_index, start, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if (state_index < 0) | (start == end):
        return
    state = states_ptr + state_index * state_stride + lane
    for row in tl.static_range(KERNEL_SIZE - 1):
        source = end - (KERNEL_SIZE - 1) + row
        moved = row + end - start
        is_old = has_state & (moved < KERNEL_SIZE - 1)
        old = tl.load(state + moved * CHANNELS, mask=tl.where(is_old, inside, False), other=0.0)
        new = tl.load(
            x_ptr + source.to(tl.int64) * x_stride + lane, mask=tl.where(source >= start, inside, False), other=0.0
        )
        tl.store(state + row * CHANNELS, old + new.to(tl.float32), mask=inside)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    states: Tensor,
    state_indices: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """Compute `ops.causal_conv`. Results of padding tokens are undefined."""
    (num_tokens, channels), num_requests = x.shape, state_indices.shape[0]
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    step = state_indices, meta.query_start_loc, meta.seq_lens, x.stride(0), states.stride(0)
    by = tuning.of(x.device).recurrent
    shape = {"CHANNELS": channels, "KERNEL_SIZE": weight.shape[0], "LANES": by.conv_channels, **overlap(x.device)}
    by_request = (num_requests, triton.cdiv(channels, by.conv_channels))
    if meta.max_query_len == 1:
        _one_token[by_request](x, weight, bias, out, states, *step, SILU=silu, **shape)
        return out
    _outputs[(triton.cdiv(num_tokens, by.conv_tokens), by_request[1])](
        x, weight, bias, out, states, *step, num_tokens, num_requests, (num_requests - 1).bit_length(),
        SILU=silu, TOKENS=by.conv_tokens, **shape,
    )  # fmt: skip
    _update_states[by_request](x, states, *step, **shape)
    return out
