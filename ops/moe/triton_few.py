"""Mixture of experts for very few tokens in Triton: two streams of weights, with no matrix product and nothing to sort.

So few tokens seldom share an expert. Each pair of token and expert reads its gates and ups alone; then each token reads the
downs of its experts, and adds them up as it goes, in the order of its ranks. Sums are in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous
from ops.moe.reference import StackedExpertWeights
from ops.moe.triton_grouped import activate
from ops.moe.triton_route import Routed


class Stream(NamedTuple):
    """What one program reads at a time: `rows` of a matrix, `depth` of each."""

    rows: int
    depth: int
    warps: int


@triton.jit
def _load_rows(ptr, row, offset, DEPTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr):
    # Columns offset .. offset + DEPTH of rows `row` [ROWS] of a matrix [OUT, IN], in float32; zeros past its ends.
    depth = offset + tl.arange(0, DEPTH)
    at = ptr + row[:, None] * IN + depth[None, :]
    if IN % DEPTH == 0 and OUT % ROWS == 0:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=(row < OUT)[:, None] & (depth < IN)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _gate_up(
    x_ptr, weight_ptr, bias_ptr, chosen_ptr, out_ptr, alpha, limit,
    TOP_K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (ROWS of OUT, pair): x [tokens, IN], weight [experts, 2 * OUT, IN] -> out [pairs, OUT], activated.
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait_for_previous(PDL)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    gate_ptr = weight_ptr + expert * (2 * OUT * IN)
    gate = tl.zeros((ROWS, DEPTH), tl.float32)
    up = tl.zeros((ROWS, DEPTH), tl.float32)
    for offset in tl.static_range(0, IN, DEPTH):
        depth = offset + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + pair // TOP_K * IN + depth, mask=depth < IN, other=0.0).to(tl.float32)[None, :]
        gate += _load_rows(gate_ptr, row, offset, DEPTH, IN, OUT, ROWS) * x
        up += _load_rows(gate_ptr + OUT * IN, row, offset, DEPTH, IN, OUT, ROWS) * x
    gates = tl.sum(gate, 1)
    ups = tl.sum(up, 1)
    if BIASED:
        gates += tl.load(bias_ptr + expert * (2 * OUT) + row, mask=row < OUT, other=0.0).to(tl.float32)
        ups += tl.load(bias_ptr + expert * (2 * OUT) + OUT + row, mask=row < OUT, other=0.0).to(tl.float32)
    result = activate(gates, ups, alpha, limit, CLAMPED)
    tl.store(out_ptr + pair * OUT + row, result.to(out_ptr.dtype.element_ty), mask=row < OUT)


@triton.jit
def _down(
    inner_ptr, weight_ptr, bias_ptr, chosen_ptr, share_ptr, plus_ptr, out_ptr,
    TOP_K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, PLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (ROWS of OUT, token): inner [pairs, IN], weight [experts, OUT, IN] -> out [tokens, OUT].
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    wait_for_previous(PDL)
    if PLUS:
        total = tl.load(plus_ptr + token * OUT + row, mask=row < OUT, other=0.0).to(tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        expert = tl.load(chosen_ptr + pair).to(tl.int64)
        part = tl.zeros((ROWS, DEPTH), tl.float32)
        for offset in tl.static_range(0, IN, DEPTH):
            depth = offset + tl.arange(0, DEPTH)
            x = tl.load(inner_ptr + pair * IN + depth, mask=depth < IN, other=0.0).to(tl.float32)[None, :]
            part += _load_rows(weight_ptr + expert * (OUT * IN), row, offset, DEPTH, IN, OUT, ROWS) * x
        result = tl.sum(part, 1)
        if BIASED:
            result += tl.load(bias_ptr + expert * OUT + row, mask=row < OUT, other=0.0).to(tl.float32)
        total += result * tl.load(share_ptr + pair)
    tl.store(out_ptr + token * OUT + row, total.to(out_ptr.dtype.element_ty), mask=row < OUT)


def gate_up(experts: StackedExpertWeights, x: Tensor, routed: Routed, how: Stream) -> Tensor:
    """x [T, H] contiguous -> [pairs, I], activated."""
    shape, weight, bias = experts.shape, experts.weights["gate_up"], experts.biases["gate_up"]
    num_pairs, top_k = routed.order.shape[0], routed.chosen.shape[1]
    out = torch.empty((num_pairs, shape.intermediate_size), dtype=x.dtype, device=x.device)
    clamped = shape.activation
    _gate_up[(triton.cdiv(shape.intermediate_size, how.rows), num_pairs)](
        x, weight, weight if bias is None else bias, routed.chosen, out, 0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit, TOP_K=top_k, IN=shape.hidden_size, OUT=shape.intermediate_size,
        ROWS=how.rows, DEPTH=how.depth, BIASED=bias is not None, CLAMPED=clamped is not None, num_warps=how.warps,
        **overlap(x.device),
    )  # fmt: skip
    return out


def down(experts: StackedExpertWeights, inner: Tensor, routed: Routed, how: Stream, plus: Tensor | None) -> Tensor:
    """inner [pairs, I] -> [T, H], and plus [T, H] contiguous on top."""
    shape, weight, bias = experts.shape, experts.weights["down"], experts.biases["down"]
    num_tokens, top_k = routed.chosen.shape
    out = torch.empty((num_tokens, shape.hidden_size), dtype=inner.dtype, device=inner.device)
    _down[(triton.cdiv(shape.hidden_size, how.rows), num_tokens)](
        inner, weight, weight if bias is None else bias, routed.chosen, routed.weights, out if plus is None else plus, out,
        TOP_K=top_k, IN=shape.intermediate_size, OUT=shape.hidden_size, ROWS=how.rows, DEPTH=how.depth,
        BIASED=bias is not None, PLUS=plus is not None, num_warps=how.warps, **overlap(inner.device),
    )  # fmt: skip
    return out
