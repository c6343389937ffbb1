"""Mixture of experts for very few tokens in Triton: two streams of weights, with no matrix product and nothing to sort.

So few tokens seldom share an expert. Each pair of token and expert reads its gates and ups alone; then each output of a token
is one long dot product along all of its experts, whose first weights are under way before what they multiply is known. Sums
are in float32, and in the same order every time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous, wait_then_let_next
from ops.moe.reference import StackedExpertWeights
from ops.moe.triton_grouped import activate
from ops.moe.triton_route import Chosen


class Stream(NamedTuple):
    """What one program reads at a time: `depth` of each of `rows` of a matrix, of all of a token's experts in `down`."""

    rows: int
    depth: int
    warps: int


@triton.jit
def _gate_up(
    x_ptr, weight_ptr, bias_ptr, chosen_ptr, out_ptr, alpha, limit,
    TOP_K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (ROWS of OUT, pair): x [tokens, IN], weight [experts, 2 * OUT, IN] -> out [pairs, OUT], activated.
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH)
    gate = tl.zeros((ROWS, DEPTH), tl.float32)
    up = tl.zeros((ROWS, DEPTH), tl.float32)
    wait_then_let_next(PDL)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    matrix_row = expert * (2 * OUT) + (row if OUT % ROWS == 0 else tl.minimum(row, OUT - 1))
    gate_at = weight_ptr + matrix_row[:, None] * IN + lane[None, :]
    x_at = x_ptr + pair // TOP_K * IN + lane
    for offset in tl.static_range(0, IN, DEPTH):
        if offset + DEPTH <= IN:
            x = tl.load(x_at + offset).to(tl.float32)[None, :]
            gate += tl.load(gate_at + offset).to(tl.float32) * x
            up += tl.load(gate_at + OUT * IN + offset).to(tl.float32) * x
        else:
            inside = lane < IN - offset
            x = tl.load(x_at + offset, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate += tl.load(gate_at + offset, mask=inside[None, :], other=0.0).to(tl.float32) * x
            up += tl.load(gate_at + OUT * IN + offset, mask=inside[None, :], other=0.0).to(tl.float32) * x
    gates = tl.sum(gate, 1)
    ups = tl.sum(up, 1)
    if BIASED:
        gates += tl.load(bias_ptr + matrix_row).to(tl.float32)
        ups += tl.load(bias_ptr + matrix_row + OUT).to(tl.float32)
    result = activate(gates, ups, alpha, limit, CLAMPED)
    tl.store(out_ptr + pair * OUT + row, result.to(out_ptr.dtype.element_ty), mask=row < OUT)


@triton.jit
def _down(
    inner_ptr, weight_ptr, bias_ptr, chosen_ptr, share_ptr, plus_ptr, out_ptr,
    TOP_K: tl.constexpr, RANKS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, BIASED: tl.constexpr, PLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per (ROWS of OUT, token): inner [pairs, IN], weight [experts, OUT, IN] -> out [tokens, OUT]. A tile is
    # [RANKS, ROWS, DEPTH]. `_gate_up` lets this start when the choice is known, and itself still runs.
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    lane = tl.arange(0, DEPTH)
    is_rank = rank < TOP_K
    pair = token * TOP_K + rank
    # Past the nearest cache, which may hold what an earlier kernel left there.
    expert = tl.load(chosen_ptr + pair, mask=is_rank, other=0, cache_modifier=".cg").to(tl.int64)
    share = tl.load(share_ptr + pair, mask=is_rank, other=0.0, cache_modifier=".cg")
    matrix_row = expert[:, None] * OUT + (row if OUT % ROWS == 0 else tl.minimum(row, OUT - 1))[None, :]
    weight_at = weight_ptr + matrix_row[:, :, None] * IN + lane[None, None, :]
    inner_at = inner_ptr + pair[:, None] * IN + lane[None, :]
    next_weight = tl.load(weight_at, mask=is_rank[:, None, None] & (lane < IN)[None, None, :], other=0.0)
    wait_for_previous(PDL)
    part = tl.zeros((ROWS, DEPTH), tl.float32)
    for offset in range(0, IN, DEPTH):
        weight = next_weight.to(tl.float32)
        follows = is_rank[:, None] & (lane < IN - DEPTH - offset)[None, :]
        next_weight = tl.load(weight_at + offset + DEPTH, mask=follows[:, None, :], other=0.0)
        inside = is_rank[:, None] & (lane < IN - offset)[None, :]
        inner = tl.load(inner_at + offset, mask=inside, other=0.0).to(tl.float32) * share[:, None]
        part += tl.sum(weight * inner[:, None, :], 0)
    total = tl.sum(part, 1)
    if BIASED:
        bias = tl.load(bias_ptr + matrix_row, mask=is_rank[:, None], other=0.0).to(tl.float32)
        total += tl.sum(bias * share[:, None], 0)
    if PLUS:
        total += tl.load(plus_ptr + token * OUT + row, mask=row < OUT, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * OUT + row, total.to(out_ptr.dtype.element_ty), mask=row < OUT)


def gate_up(experts: StackedExpertWeights, x: Tensor, chosen: Chosen, how: Stream) -> Tensor:
    """x [T, H] contiguous -> [pairs, I], activated."""
    shape, weight, bias = experts.shape, experts.weights["gate_up"], experts.biases["gate_up"]
    num_pairs, top_k = chosen.experts.numel(), chosen.experts.shape[1]
    out = torch.empty((num_pairs, shape.intermediate_size), dtype=x.dtype, device=x.device)
    clamped = shape.activation
    _gate_up[(triton.cdiv(shape.intermediate_size, how.rows), num_pairs)](
        x, weight, weight if bias is None else bias, chosen.experts, out, 0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit, TOP_K=top_k, IN=shape.hidden_size, OUT=shape.intermediate_size,
        ROWS=how.rows, DEPTH=how.depth, BIASED=bias is not None, CLAMPED=clamped is not None, num_warps=how.warps,
        **overlap(x.device),
    )  # fmt: skip
    return out


def down(experts: StackedExpertWeights, inner: Tensor, chosen: Chosen, how: Stream, plus: Tensor | None) -> Tensor:
    """inner [pairs, I], from `gate_up` by the same choice -> [T, H], and plus [T, H] contiguous on top."""
    shape, weight, bias = experts.shape, experts.weights["down"], experts.biases["down"]
    num_tokens, top_k = chosen.experts.shape
    out = torch.empty((num_tokens, shape.hidden_size), dtype=inner.dtype, device=inner.device)
    _down[(triton.cdiv(shape.hidden_size, how.rows), num_tokens)](
        inner, weight, weight if bias is None else bias, *chosen, out if plus is None else plus, out,
        TOP_K=top_k, RANKS=triton.next_power_of_2(top_k), IN=shape.intermediate_size, OUT=shape.hidden_size,
        ROWS=how.rows, DEPTH=how.depth, BIASED=bias is not None, PLUS=plus is not None, num_warps=how.warps,
        **overlap(inner.device),
    )  # fmt: skip
    return out
