"""Routing in Triton: from router logits to each token's experts, and to a list of (token, rank) pairs sorted by expert, without
the host.

A counting sort: each block of tokens counts its pairs by expert, and a pair's place is its expert's start, plus the pairs of
earlier blocks, plus those before it in its own. No atomics: the order is by expert, then by token. A step that fits one
block is routed and sorted by one program."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous
from ops.moe.weights import Routing

_LEAST = tl.constexpr(-3.0e38)  # lowest score of selectable experts; others are minus infinity
_FEW, _MANY = 16, 64  # tokens per program
TOKENS_OF_EACH_ROUTE = (2 * _MANY, _MANY, _FEW)  # numbers of tokens that together cover all code paths of `route`
_MAX_LANES = 1 << 13  # maximum of tokens times experts per program


class Chosen(NamedTuple):
    """Chosen experts of each token, [T, top_k] int32, and their weights, [T, top_k] float32."""

    experts: Tensor
    weights: Tensor


class Routed(NamedTuple):
    """Routing of T tokens to E experts. Pair p is rank p % top_k of token p // top_k. order [T * top_k] int32: pairs sorted
    by expert; those of expert e are at starts[e] to starts[e + 1]. starts [E + 1] int32."""

    chosen: Chosen
    order: Tensor
    starts: Tensor


@triton.jit
def _best_groups(choice, GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr):
    # choice [tokens, GROUPS padded * GROUP_LANES], one group after another -> whether each expert is in a selected group.
    TOKENS: tl.constexpr = choice.shape[0]
    GROUPS_PAD: tl.constexpr = choice.shape[1] // GROUP_LANES
    grouped = tl.reshape(choice, (TOKENS, GROUPS_PAD, GROUP_LANES))
    judged, at = tl.max(grouped, 2, return_indices=True)
    if TWO:
        member = tl.arange(0, GROUP_LANES)[None, None, :]
        judged += tl.max(tl.where(member == at[:, :, None], -float("inf"), grouped), 2)
    group = tl.arange(0, GROUPS_PAD)[None, :]
    judged = tl.where(group < GROUPS, tl.maximum(judged, _LEAST), -float("inf"))
    taken = tl.zeros((TOKENS, GROUPS_PAD), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, at = tl.max(judged, 1, return_indices=True)
        taken = tl.where(group == at[:, None], 1, taken)
        judged = tl.where(taken > 0, -float("inf"), judged)
    taken = tl.broadcast_to(taken[:, :, None], (TOKENS, GROUPS_PAD, GROUP_LANES))
    return tl.reshape(taken, (TOKENS, GROUPS_PAD * GROUP_LANES)) > 0


@triton.jit
def _choose(
    logits, correction, is_expert, scale, min_sum, twice_jitter,
    SCORE: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    # logits [TOKENS, LANES] float32; correction and is_expert [LANES]. Returns the rank of each lane (TOP_K: not selected),
    # and lanes and weights by rank, both [TOKENS, RANKS]. For any values, each rank has a different expert.
    TOKENS: tl.constexpr = logits.shape[0]
    LANES: tl.constexpr = logits.shape[1]
    lane = tl.arange(0, LANES)[None, :]
    rank = tl.arange(0, RANKS)[None, :]
    some = is_expert[None, :]
    if SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORE == "softmax":
        scores = tl.exp(logits - tl.max(tl.where(some, logits, -float("inf")), 1)[:, None])
        scores = tl.where(some, scores, 0.0)
        scores = scores / tl.sum(scores, 1)[:, None]
    else:
        scores = logits
    choice = scores + correction[None, :]
    choice = tl.where(some, tl.where(choice == choice, tl.maximum(choice, _LEAST), _LEAST), -float("inf"))
    if GROUPS > 1:
        within = _best_groups(choice, GROUPS, GROUP_LANES, TOP_GROUPS, TWO)
        choice = tl.where(some & (within == 0), _LEAST, choice)
    taken_by = tl.full((TOKENS, LANES), TOP_K, tl.int32)
    lanes = tl.zeros((TOKENS, RANKS), tl.int32)
    weights = tl.zeros((TOKENS, RANKS), tl.float32)
    for r in tl.static_range(TOP_K):
        best, at = tl.max(choice, 1, return_indices=True)
        if SCORE == "sparsemixer":
            far = (best[:, None] - logits) / tl.maximum(tl.abs(logits), best[:, None]) > twice_jitter
            weight = 1.0 / tl.sum(tl.where(far, 0.0, tl.exp(choice - best[:, None])), 1)
        else:
            weight = tl.sum(tl.where(lane == at[:, None], scores, 0.0), 1)
        taken_by = tl.where(lane == at[:, None], r, taken_by)
        choice = tl.where(lane == at[:, None], -float("inf"), choice)
        lanes = tl.where(rank == r, at[:, None], lanes)
        weights = tl.where(rank == r, weight[:, None], weights)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 1), min_sum)[:, None]
    return taken_by, lanes, weights * scale


@triton.jit
def _place(taken_by, first, order_ptr, token, TOP_K: tl.constexpr):
    # Store the pairs of a block; those of each expert start at first [LANES].
    taken = (taken_by < TOP_K).to(tl.int32)
    place = first[None, :] + tl.cumsum(taken, 0) - taken
    tl.store(order_ptr + place, token[:, None] * TOP_K + taken_by, mask=taken > 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits_ptr, correction_ptr, order_ptr, starts_ptr, counts_ptr, chosen_ptr, weights_ptr, num_tokens,
    scale, min_sum, twice_jitter,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUP_LANES: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr, CORRECTED: tl.constexpr, TOKENS: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program per TOKENS tokens. A lane is a group and a member of it, both padded to powers of two: lanes rise with experts.
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, GROUPS_PAD * GROUP_LANES)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    is_expert = (lane % GROUP_LANES < SIZE) & (lane // GROUP_LANES < GROUPS)
    expert = lane // GROUP_LANES * SIZE + lane % GROUP_LANES
    correction = tl.zeros((GROUPS_PAD * GROUP_LANES,), tl.float32)
    if CORRECTED:
        correction = tl.load(correction_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    is_token = token < num_tokens
    logits_at = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(logits_ptr + logits_at, mask=is_token[:, None] & is_expert[None, :], other=0.0).to(tl.float32)
    taken_by, lanes, weights = _choose(
        logits, correction, is_expert, scale, min_sum, twice_jitter, SCORE, TOP_K, RANKS, RENORMALIZE, GROUPS,
        GROUP_LANES, TOP_GROUPS, TWO,
    )  # fmt: skip
    taken_by = tl.where(is_token[:, None], taken_by, TOP_K)
    rank = tl.arange(0, RANKS)[None, :]
    pair = token[:, None] * TOP_K + rank
    is_pair = is_token[:, None] & (rank < TOP_K)
    tl.store(weights_ptr + pair, weights, mask=is_pair)
    tl.store(chosen_ptr + pair, lanes // GROUP_LANES * SIZE + lanes % GROUP_LANES, mask=is_pair)
    counts = tl.sum((taken_by < TOP_K).to(tl.int32), 0)
    if ALONE:
        first = tl.cumsum(counts, 0) - counts
        tl.store(starts_ptr + expert, first, mask=is_expert)
        tl.store(starts_ptr + EXPERTS, num_tokens * TOP_K)
        _place(taken_by, first, order_ptr, token, TOP_K)
    else:
        tl.store(counts_ptr + block * GROUPS_PAD * GROUP_LANES + lane, counts)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _sort(
    chosen_ptr, counts_ptr, order_ptr, starts_ptr, num_tokens, num_blocks,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    GROUP_LANES: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The second half of a routing by many programs, one per block again: counts [num_blocks, LANES], chosen [pairs].
    block = tl.program_id(0)
    LANES: tl.constexpr = GROUPS_PAD * GROUP_LANES
    SIZE: tl.constexpr = EXPERTS // GROUPS
    lane = tl.arange(0, LANES)
    is_expert = (lane % GROUP_LANES < SIZE) & (lane // GROUP_LANES < GROUPS)
    expert = tl.where(is_expert, lane // GROUP_LANES * SIZE + lane % GROUP_LANES, -2)
    token = block * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    wait_for_previous(PDL)
    earlier = tl.zeros((LANES,), tl.int32)
    total = tl.zeros((LANES,), tl.int32)
    for begin in range(0, num_blocks, BLOCKS):
        other = begin + tl.arange(0, BLOCKS)[:, None]
        counts = tl.load(counts_ptr + other * LANES + lane[None, :], mask=other < num_blocks, other=0)
        earlier += tl.sum(tl.where(other < block, counts, 0), 0)
        total += tl.sum(counts, 0)
    start = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(starts_ptr + expert, start, mask=is_expert)
        tl.store(starts_ptr + EXPERTS, num_tokens * TOP_K)
    taken_by = tl.full((TOKENS, LANES), TOP_K, tl.int32)
    for r in tl.static_range(TOP_K):
        taken = tl.load(chosen_ptr + token[:, None] * TOP_K + r, mask=is_token, other=-1)
        taken_by = tl.where(expert[None, :] == taken, r, taken_by)
    _place(taken_by, start + earlier, order_ptr, token, TOP_K)


def route(logits: Tensor, routing: Routing, e_score_correction_bias: Tensor | None = None) -> Routed:
    """Route by logits [T, E] contiguous, T at least 1. e_score_correction_bias: [E] or None."""
    num_tokens, num_experts = logits.shape
    top_k, device = routing.top_k, logits.device
    lanes = _lanes(num_experts, routing)
    num_lanes = prod(lanes.values())
    tokens = min(_FEW if num_tokens <= _FEW else _MANY, max(1, _MAX_LANES // num_lanes))
    num_blocks = triton.cdiv(num_tokens, tokens)
    alone, corrected = num_blocks == 1, e_score_correction_bias is not None
    chosen = Chosen(
        torch.empty((num_tokens, top_k), dtype=torch.int32, device=device),
        torch.empty((num_tokens, top_k), dtype=torch.float32, device=device),
    )
    order = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    counts = starts if alone else torch.empty((num_blocks, num_lanes), dtype=torch.int32, device=device)
    common = {
        "EXPERTS": num_experts, "TOP_K": top_k, "GROUPS": routing.num_groups, **lanes, "TOKENS": tokens,
        "num_warps": max(1, min(8, tokens * num_lanes // 256)), **overlap(device),
    }  # fmt: skip
    _route[(num_blocks,)](
        logits, e_score_correction_bias if corrected else logits, order, starts, counts, *chosen, num_tokens,
        routing.scale, routing.min_sum, 2 * routing.jitter,
        RANKS=triton.next_power_of_2(top_k), SCORE=routing.score, RENORMALIZE=routing.renormalize,
        TOP_GROUPS=routing.top_groups, TWO=routing.group_score == "top-2 sum", CORRECTED=corrected,
        ALONE=alone, **common,
    )  # fmt: skip
    if not alone:
        blocks = max(1, min(_MAX_LANES // num_lanes, triton.next_power_of_2(num_blocks)))
        _sort[(num_blocks,)](chosen.experts, counts, order, starts, num_tokens, num_blocks, BLOCKS=blocks, **common)
    return Routed(chosen, order, starts)


def _lanes(num_experts: int, routing: Routing) -> dict[str, int]:
    groups = routing.num_groups
    return {"GROUPS_PAD": triton.next_power_of_2(groups), "GROUP_LANES": triton.next_power_of_2(num_experts // groups)}


@triton.jit
def _gather(
    x_ptr, order_ptr, out_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr
):
    # x [tokens, WIDTH], order [pairs] -> out [pairs, WIDTH].
    place = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    wait_for_previous(PDL)
    token = (tl.load(order_ptr + place) // TOP_K).to(tl.int64)
    row = tl.load(x_ptr + token * WIDTH + lane, mask=lane < WIDTH)
    tl.store(out_ptr + place * WIDTH + lane, row, mask=lane < WIDTH)


def gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return [T * top_k, H]: for each pair in `order` [T * top_k] int32 (`Routed`), the row of its token in x [T, H]."""
    num_pairs, width = order.shape[0], x.shape[1]
    out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    lanes = min(2048, triton.next_power_of_2(width))
    if num_pairs:
        _gather[(num_pairs, triton.cdiv(width, lanes))](
            x.contiguous(), order, out, TOP_K=top_k, WIDTH=width, LANES=lanes, num_warps=4, **overlap(x.device)
        )
    return out
