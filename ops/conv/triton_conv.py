"""Causal convolution in Triton. Lines of one token are one pass over what their slots hold. For longer ones all outputs come
first, whatever line a token is of, and then every line's memory is replaced: nothing that is still read is overwritten."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.meta import AttentionMeta
from ops.launch import overlap, wait_for_previous
from ops.scan.triton_lines import line_span


@triton.jit
def _finish(total, bias_ptr, lane, inside, SILU: tl.constexpr):
    if bias_ptr is not None:
        total += tl.load(bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _one_token(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, x_stride, state_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (line, LANES channels). x and out [tokens, CHANNELS], states [slots, TAPS - 1, CHANNELS].
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < CHANNELS
    wait_for_previous(PDL)
    slot, start, end, remembers = line_span(slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0))
    if (slot < 0) | (start == end):
        return
    state = states_ptr + slot * state_stride + lane
    total = tl.zeros((LANES,), tl.float32)
    for tap in tl.static_range(TAPS - 1):
        seen = tl.load(state + tap * CHANNELS, mask=tl.where(remembers, inside, False), other=0.0)
        total += seen * tl.load(weight_ptr + tap * CHANNELS + lane, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(state + (tap - 1) * CHANNELS, seen, mask=inside)
    new = tl.load(x_ptr + start.to(tl.int64) * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    total += new * tl.load(weight_ptr + (TAPS - 1) * CHANNELS + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(state + (TAPS - 2) * CHANNELS, new, mask=inside)
    total = _finish(total, bias_ptr, lane, inside, SILU)
    tl.store(out_ptr + start.to(tl.int64) * CHANNELS + lane, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_lines", "num_halvings"])  # one program for all captured steps
def _outputs(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, x_stride, state_stride,
    num_tokens, num_lines, num_halvings,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program per (TOKENS tokens, LANES channels).
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lane = (tl.program_id(1) * LANES + tl.arange(0, LANES))[None, :]
    inside = lane < CHANNELS
    wait_for_previous(PDL)
    line = tl.zeros((TOKENS,), tl.int32)  # the last that begins at or before the token
    for step in range(num_halvings):
        later = line + (1 << (num_halvings - 1 - step))
        begin = tl.load(query_start_loc_ptr + later, mask=later < num_lines, other=2147483647)
        line = tl.where(begin <= token, later, line)
    slot = tl.load(slot_mapping_ptr + line)
    start = tl.load(query_start_loc_ptr + line)
    end = tl.load(query_start_loc_ptr + line + 1)
    is_token = (token < end) & (token < num_tokens) & (slot >= 0)
    remembers = is_token & (tl.load(seq_lens_ptr + line) > end - start)
    state = states_ptr + slot * state_stride
    total = tl.zeros((TOKENS, LANES), tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        here = is_token & (source >= start)
        seen = tl.load(
            x_ptr + source.to(tl.int64)[:, None] * x_stride + lane, mask=here[:, None] & inside, other=0.0
        ).to(tl.float32)
        before = remembers & (source < start)
        row = tl.where(before, TAPS - 1 + source - start, 0)
        seen += tl.load(state[:, None] + row[:, None] * CHANNELS + lane, mask=before[:, None] & inside, other=0.0)
        total += seen * tl.load(weight_ptr + tap * CHANNELS + lane, mask=inside, other=0.0).to(tl.float32)
    total = _finish(total, bias_ptr, lane, inside, SILU)
    at = out_ptr + token.to(tl.int64)[:, None] * CHANNELS + lane
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & inside)


@triton.jit
def _remember(
    x_ptr, states_ptr, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, x_stride, state_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (line, LANES channels): rows move up by as many tokens as came, in order, so each is read before it is
    # written; one thread keeps its channel throughout.
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < CHANNELS
    wait_for_previous(PDL)
    slot, start, end, remembers = line_span(slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0))
    if (slot < 0) | (start == end):
        return
    state = states_ptr + slot * state_stride + lane
    for row in tl.static_range(TAPS - 1):
        source = end - (TAPS - 1) + row
        moved = row + end - start
        is_old = remembers & (moved < TAPS - 1)
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
    slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """See `ops.causal_conv`. Tokens of no line get anything."""
    (num_tokens, channels), num_lines = x.shape, slot_mapping.shape[0]
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    step = slot_mapping, meta.query_start_loc, meta.seq_lens, x.stride(0), states.stride(0)
    by = tuning.of(x.device).recurrent
    shape = {"CHANNELS": channels, "TAPS": weight.shape[0], "LANES": by.conv_channels, **overlap(x.device)}
    by_line = (num_lines, triton.cdiv(channels, by.conv_channels))
    if meta.max_query_len == 1:
        _one_token[by_line](x, weight, bias, out, states, *step, SILU=silu, **shape)
        return out
    _outputs[(triton.cdiv(num_tokens, by.conv_tokens), by_line[1])](
        x, weight, bias, out, states, *step, num_tokens, num_lines, (num_lines - 1).bit_length(),
        SILU=silu, TOKENS=by.conv_tokens, **shape,
    )  # fmt: skip
    _remember[by_line](x, states, *step, **shape)
    return out
