"""Gated delta rule in Triton. Requests of one token read, update and write their state once. Longer ones process their tokens in
chunks of matrix products and keep the state in registers from the first chunk to the last (Yang et al. 2024).

The corrections of a chunk's tokens depend on each other by a unit lower triangular matrix, inverted from the diagonal outwards:
blocks of twice the size from pairs of blocks, [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], all pairs by one product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tuning
from ops.attention.meta import AttentionMeta
from ops.delta.reference import NORM_EPS, DeltaHeads
from ops.launch import overlap, wait_for_previous
from ops.scan.triton_common import EXACT, chunk_size, lanes, precision, request_span, softplus


@triton.jit
def _one_token(
    qkv_ptr, ba_ptr, a_ptr, bias_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, ba_stride,
    state_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_LANES: tl.constexpr,
    COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, value head, COLS of its dims); a state is [KEY, VALUE].
    head = tl.program_id(1)
    row = tl.arange(0, KEY_LANES)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    a = tl.load(a_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait_for_previous(PDL)
    state_index, start, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if (state_index < 0) | (end - start != 1):
        return
    KEYS: tl.constexpr = KEY_HEADS * KEY
    token = start.to(tl.int64)
    qkv = qkv_ptr + token * (2 * KEYS + HEADS * VALUE)
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(qkv + key_head * KEY + row, mask=row < KEY, other=0.0).to(tl.float32)
    k = tl.load(qkv + KEYS + key_head * KEY + row, mask=row < KEY, other=0.0).to(tl.float32)
    v = tl.load(qkv + 2 * KEYS + head * VALUE + col, mask=col < VALUE, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + eps) / tl.sqrt(KEY * 1.0)
    k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    ba_at = ba_ptr + token * ba_stride + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(ba_at).to(tl.float32)))
    fade = tl.exp(a * softplus(tl.load(ba_at + HEADS).to(tl.float32) + bias))
    at = states_ptr + state_index * state_stride + (head * KEY + row)[:, None] * VALUE + col[None, :]
    inside = (row < KEY)[:, None] & (col < VALUE)[None, :]
    state = tl.load(at, mask=tl.where(has_state, inside, False), other=0.0) * fade
    error = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (error * beta)[None, :]
    tl.store(at, state, mask=inside)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + token * HEADS * VALUE + head * VALUE + col, out.to(out_ptr.dtype.element_ty), mask=col < VALUE)


@triton.jit
def _inverse(system, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    # system [CHUNK, CHUNK], read below the diagonal, with ones on it -> its inverse.
    row = tl.arange(0, CHUNK)[:, None]
    col = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == col, 1.0, 0.0)
    size = 1
    while size < CHUNK:
        # C of each pair of blocks of this size: rows of the second, columns of the first.
        is_pair = (row // (2 * size) == col // (2 * size)) & (row // size > col // size)
        between = tl.dot(tl.where(is_pair, system, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, between, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def _chunks(
    qkv_ptr, ba_ptr, a_ptr, bias_ptr, out_ptr, states_ptr, state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, ba_stride,
    state_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_LANES: tl.constexpr,
    COLS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, INVERSION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (request, value head, COLS of its dims).
    head = tl.program_id(1)
    row = tl.arange(0, KEY_LANES)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    a = tl.load(a_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait_for_previous(PDL)
    state_index, first, end, has_state = request_span(
        state_indices_ptr, query_start_loc_ptr, seq_lens_ptr, tl.program_id(0)
    )
    if (state_index < 0) | (end - first < 2):
        return
    KEYS: tl.constexpr = KEY_HEADS * KEY
    key_head = head // (HEADS // KEY_HEADS)
    at = states_ptr + state_index * state_stride + (head * KEY + row)[:, None] * VALUE + col[None, :]
    inside = (row < KEY)[:, None] & (col < VALUE)[None, :]
    state = tl.load(at, mask=tl.where(has_state, inside, False), other=0.0)
    place = tl.arange(0, CHUNK)
    is_before = place[:, None] >= place[None, :]
    for start in range(first, end, CHUNK):
        token = (start + place).to(tl.int64)
        is_token = token < end
        ba_at = ba_ptr + token * ba_stride + head
        logit = tl.load(ba_at, mask=is_token, other=0.0).to(tl.float32)
        beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-logit)), 0.0)  # padding tokens correct nothing
        rate = softplus(tl.load(ba_at + HEADS, mask=is_token, other=0.0).to(tl.float32) + bias)
        decay = tl.where(is_token, a * rate, 0.0)
        until = tl.cumsum(decay, 0)
        total = tl.sum(decay, 0)
        between = tl.exp(tl.where(is_before, until[:, None] - until[None, :], -float("inf")))
        qkv = qkv_ptr + token[:, None] * (2 * KEYS + HEADS * VALUE)
        in_key = is_token[:, None] & (row < KEY)[None, :]
        in_value = is_token[:, None] & (col < VALUE)[None, :]
        k = tl.load(qkv + KEYS + key_head * KEY + row[None, :], mask=in_key, other=0.0).to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k, 1) + eps)[:, None]
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
        v = tl.load(qkv + 2 * KEYS + head * VALUE + col[None, :], mask=in_value, other=0.0).to(tl.float32)
        errors = v - tl.dot(k, state, input_precision=PRECISION) * tl.exp(until)[:, None]
        inverse = _inverse(system, CHUNK, INVERSION)
        corrections = tl.dot(inverse, errors * beta[:, None], input_precision=INVERSION)
        q = tl.load(qkv + key_head * KEY + row[None, :], mask=in_key, other=0.0).to(tl.float32)
        q *= (tl.rsqrt(tl.sum(q * q, 1) + eps) / tl.sqrt(KEY * 1.0))[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        out = tl.dot(scores, corrections, input_precision=PRECISION)
        out += tl.dot(q, state, input_precision=PRECISION) * tl.exp(until)[:, None]
        k *= tl.exp(total - until)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(k), corrections, input_precision=PRECISION)
        to = out_ptr + token[:, None] * (HEADS * VALUE) + head * VALUE + col[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=in_value)
    tl.store(at, state, mask=inside)


def gated_delta_rule(
    qkv: Tensor, ba: Tensor, heads: DeltaHeads, states: Tensor, state_indices: Tensor, meta: AttentionMeta
) -> Tensor:
    """Compute `ops.gated_delta_rule`. Results of padding tokens are undefined."""
    out = torch.empty((qkv.shape[0], heads.sizes[2]), dtype=qkv.dtype, device=qkv.device)
    if not qkv.shape[0]:
        return out
    tensors = (
        qkv, ba, heads.a, heads.dt_bias, out, states, state_indices, meta.query_start_loc, meta.seq_lens, ba.stride(0),
        states.stride(0), NORM_EPS,
    )  # fmt: skip
    shape = {
        "KEY_HEADS": heads.num_key_heads, "HEADS": heads.num_value_heads, "KEY": heads.key_size, "VALUE": heads.value_size,
        "KEY_LANES": lanes(heads.key_size), **overlap(qkv.device),
    }  # fmt: skip
    grid, by = (state_indices.shape[0], heads.num_value_heads), tuning.of(qkv.device).recurrent
    _one_token[(*grid, triton.cdiv(heads.value_size, by.single_delta_columns))](
        *tensors, COLS=by.single_delta_columns, num_warps=by.single_delta_warps, **shape
    )
    if meta.max_query_len > 1:
        _chunks[(*grid, triton.cdiv(heads.value_size, by.delta_columns))](
            *tensors, COLS=by.delta_columns, CHUNK=chunk_size(qkv), PRECISION=precision(qkv), INVERSION=EXACT,
            num_warps=by.delta_warps, **shape,
        )  # fmt: skip
    return out
