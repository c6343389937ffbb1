"""Sorting of a step's tokens by adapter slot, and division into tiles with one adapter each, by one kernel per step.

It is launched without overlap, because the next kernel reads its result. A token's place is the number of tokens that sort before
it. Each program counts these itself, which costs less than another launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.lora.share import TokenAdapters

_FEW_TOKENS = 512  # up to this number, tiles are small
_LANES = 128  # tokens or tiles per program


def tile_rows(num_tokens: int) -> int:
    return 16 if num_tokens <= _FEW_TOKENS else 64


@triton.jit
def _keys(slots_ptr, token, num_tokens, NUM_SLOTS: tl.constexpr):
    # Sort key of tokens: their slot; NUM_SLOTS for tokens without an adapter, more for padding.
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=NUM_SLOTS + 1)
    return tl.where(slot < 0, NUM_SLOTS, slot)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _index(
    slots_ptr, order_ptr, tiles_ptr, used_ptr, num_tokens, num_tiles,
    NUM_SLOTS: tl.constexpr, SLOT_LANES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # slots [tokens] -> order [tokens], tiles [3, num_tiles], used [2]; the last program computes tiles, the others tokens.
    lane = tl.arange(0, LANES)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        token = tl.program_id(0) * LANES + lane
        key = _keys(slots_ptr, token, num_tokens, NUM_SLOTS)
        place = tl.zeros((LANES,), tl.int32)
        for start in range(0, num_tokens, LANES):
            other = start + lane
            others = _keys(slots_ptr, other, num_tokens, NUM_SLOTS)
            before = others[None, :] < key[:, None]
            before |= (others[None, :] == key[:, None]) & (other[None, :] < token[:, None])
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(order_ptr + place, token, mask=token < num_tokens)
    else:
        slot = tl.arange(0, SLOT_LANES)
        count = tl.zeros((SLOT_LANES,), tl.int32)
        for start in range(0, num_tokens, LANES):
            key = _keys(slots_ptr, start + lane, num_tokens, NUM_SLOTS)
            count += tl.sum((key[None, :] == slot[:, None]).to(tl.int32), 1)
        tiles = tl.cdiv(count, ROWS)
        upto, end = tl.cumsum(tiles, 0), tl.cumsum(count, 0)
        begin, start_tile = end - count, upto - tiles
        tl.store(used_ptr, tl.sum(tl.where(slot < NUM_SLOTS, tiles, 0), 0))
        tl.store(used_ptr + 1, tl.sum(tl.where(slot <= NUM_SLOTS, tiles, 0), 0))
        for start in range(0, num_tiles, LANES):
            tile = start + lane
            owner = tl.sum((upto[None, :] <= tile[:, None]).to(tl.int32), 1)
            is_owner = slot[None, :] == owner[:, None]
            first = tl.sum(tl.where(is_owner, begin[None, :] + (tile[:, None] - start_tile[None, :]) * ROWS, 0), 1)
            stop = tl.sum(tl.where(is_owner, end[None, :], 0), 1)
            inside = tile < num_tiles
            tl.store(tiles_ptr + tile, tl.where(owner < NUM_SLOTS, owner, -1), mask=inside)
            tl.store(tiles_ptr + num_tiles + tile, first, mask=inside)
            tl.store(tiles_ptr + 2 * num_tiles + tile, stop, mask=inside)


def index(slots: Tensor, num_slots: int) -> TokenAdapters:
    """Sort tokens by slots [T] int32, some of which may be -1; see `TokenAdapters`. The host reads no result."""
    num_tokens, device = len(slots), slots.device
    rows = tile_rows(num_tokens)
    num_tiles = triton.cdiv(num_tokens, rows) + min(num_slots + 1, num_tokens)
    order, used = (torch.empty(size, dtype=torch.int32, device=device) for size in (num_tokens, 2))
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=device)
    _index[(triton.cdiv(num_tokens, _LANES) + 1,)](
        slots, order, tiles, used, num_tokens, num_tiles, NUM_SLOTS=num_slots,
        SLOT_LANES=triton.next_power_of_2(num_slots + 1), ROWS=rows, LANES=_LANES, num_warps=8,
    )  # fmt: skip
    return TokenAdapters(slots, order, tiles, used)
