"""Mamba-2's scan in Triton. Requests of one token read, update and write their state once. Longer ones process their tokens
in chunks of matrix products and keep the state in registers from the first chunk to the last (Dao and Gu 2024)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.meta import AttentionMeta
from ops.launch import overlap, wait_for_previous
from ops.scan.reference import ScanHeads
from ops.scan.triton_common import chunk_size, lanes, precision, request_span, softplus


@triton.jit
def _one_token(
    xbc_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr,
    dt_stride, state_stride,
    HEADS: tl.constexpr, HEAD: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr,
    STATE_LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, head, ROWS of the head's dims); a state is [HEAD, STATE].
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, STATE_LANES)
    a = tl.load(a_ptr + head)
    d = tl.load(d_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait_for_previous(PDL)
    state_index, start, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if (state_index < 0) | (end - start != 1):
        return
    INNER: tl.constexpr = HEADS * HEAD
    token = start.to(tl.int64)
    xbc = xbc_ptr + token * (INNER + 2 * GROUPS * STATE)
    group = head // (HEADS // GROUPS)
    dt = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + bias)
    x = tl.load(xbc + head * HEAD + row, mask=row < HEAD, other=0.0).to(tl.float32)
    b = tl.load(xbc + INNER + group * STATE + col, mask=col < STATE, other=0.0).to(tl.float32)
    c = tl.load(xbc + INNER + (GROUPS + group) * STATE + col, mask=col < STATE, other=0.0).to(tl.float32)
    at = states_ptr + state_index * state_stride + (head * HEAD + row)[:, None] * STATE + col[None, :]
    inside = (row < HEAD)[:, None] & (col < STATE)[None, :]
    state = tl.load(at, mask=tl.where(has_state, inside, False), other=0.0)
    state = state * tl.exp(dt * a) + (x * dt)[:, None] * b[None, :]
    tl.store(at, state, mask=inside)
    out = tl.sum(state * c[None, :], 1) + d * x
    tl.store(out_ptr + token * INNER + head * HEAD + row, out.to(out_ptr.dtype.element_ty), mask=row < HEAD)


@triton.jit
def _chunks(
    xbc_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr,
    dt_stride, state_stride,
    HEADS: tl.constexpr, HEAD: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr,
    STATE_LANES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, head, ROWS of the head's dims).
    head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, STATE_LANES)
    a = tl.load(a_ptr + head)
    d = tl.load(d_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait_for_previous(PDL)
    state_index, first, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if (state_index < 0) | (end - first < 2):
        return
    INNER: tl.constexpr = HEADS * HEAD
    WIDTH: tl.constexpr = INNER + 2 * GROUPS * STATE
    group = head // (HEADS // GROUPS)
    at = states_ptr + state_index * state_stride + (head * HEAD + row)[:, None] * STATE + col[None, :]
    inside = (row < HEAD)[:, None] & (col < STATE)[None, :]
    state = tl.load(at, mask=tl.where(has_state, inside, False), other=0.0)
    place = tl.arange(0, CHUNK)
    is_before = place[:, None] >= place[None, :]
    for start in range(first, end, CHUNK):
        token = (start + place).to(tl.int64)
        is_token = token < end
        dt = softplus(tl.load(dt_ptr + token * dt_stride + head, mask=is_token, other=0.0).to(tl.float32) + bias)
        dt = tl.where(is_token, dt, 0.0)
        until = tl.cumsum(dt * a, 0)
        total = tl.sum(dt * a, 0)
        xbc = xbc_ptr + token[:, None] * WIDTH
        x = tl.load(xbc + head * HEAD + row[None, :], mask=is_token[:, None] & (row < HEAD)[None, :], other=0.0)
        in_state = is_token[:, None] & (col < STATE)[None, :]
        b = tl.load(xbc + INNER + group * STATE + col[None, :], mask=in_state, other=0.0).to(tl.float32)
        c = tl.load(xbc + INNER + (GROUPS + group) * STATE + col[None, :], mask=in_state, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        dx = x * dt[:, None]
        between = tl.exp(tl.where(is_before, until[:, None] - until[None, :], -float("inf")))
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * between
        out = tl.dot(scores, dx, input_precision=PRECISION) + d * x
        out += tl.dot(c, tl.trans(state), input_precision=PRECISION) * tl.exp(until)[:, None]
        grown = dx * tl.exp(total - until)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(grown), b, input_precision=PRECISION)
        to = out_ptr + token[:, None] * INNER + head * HEAD + row[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (row < HEAD)[None, :])
    tl.store(at, state, mask=inside)


def state_space_scan(
    xbc: Tensor, dt: Tensor, heads: ScanHeads, states: Tensor, state_indices: Tensor, meta: AttentionMeta
) -> Tensor:
    """Compute `ops.state_space_scan`. Results of padding tokens are undefined."""
    out = torch.empty((xbc.shape[0], heads.inner_size), dtype=xbc.dtype, device=xbc.device)
    if not xbc.shape[0]:
        return out
    tensors = (
        xbc, dt, heads.a, heads.d, heads.dt_bias, out, states, state_indices, meta.query_start_loc, meta.seq_lens,
        dt.stride(0), states.stride(0),
    )  # fmt: skip
    shape = {
        "HEADS": heads.num_heads, "HEAD": heads.head_size, "GROUPS": heads.num_groups, "STATE": heads.state_size,
        "STATE_LANES": lanes(heads.state_size), **overlap(xbc.device),
    }  # fmt: skip
    grid, by = (state_indices.shape[0], heads.num_heads), tuning.of(xbc.device).recurrent
    _one_token[(*grid, triton.cdiv(heads.head_size, by.single_scan_rows))](
        *tensors, ROWS=by.single_scan_rows, num_warps=by.single_scan_warps, **shape
    )
    if meta.max_query_len > 1:
        rows = min(lanes(heads.head_size), max(16, by.scan_rows * 128 // shape["STATE_LANES"]))
        _chunks[(*grid, triton.cdiv(heads.head_size, rows))](
            *tensors, ROWS=rows, CHUNK=chunk_size(xbc), PRECISION=precision(xbc), num_warps=by.scan_warps, **shape
        )
    return out
