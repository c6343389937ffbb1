"""Adapters in Triton: tokens sorted by slot once a step, then for each layer two kernels over tiles of one adapter's tokens.

All that differs from step to step is read from device memory: which slot each token has, and so which tiles there are. The grid is
an upper bound that follows from the number of tokens and slots alone, and a program without a tile ends at once, so one captured
graph serves any mixture, none included. The first kernel shrinks the inputs for all parts of a layer, with the inner sum cut into
pieces where few tokens would leave the device idle; the second adds the pieces up, expands, and adds to what the weight gave. Each
output belongs to one program: the same bits every time.

What a kernel reads before it waits for the one before it: which tiles there are, which torch's kernels wrote as the step
began, none of which lets a later one begin early; and adapters, which copies wrote. Every program waits, those without a
tile too: else whoever comes next would take what came before for done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous
from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters

_FEW_TOKENS = 512  # up to which tiles are small
_MANY_TILES = 128  # from which on the inner sum is not cut
_PIECES = 16
_DEPTH, _COLUMNS = 256, 128
_LEAST_RANK = 16  # of a matrix product


def tile_rows(num_tokens: int) -> int:
    return 16 if num_tokens <= _FEW_TOKENS else 64


def index(slots: Tensor, num_slots: int) -> TokenAdapters:
    """slots [T] int32 -> order [T] int32, the tokens by slot, those without last; tiles [3, M] int32: the slot of each, -1 for
    none, and the places in that order where it begins and where its slot's tokens end. The host asks for no number of it."""
    num_tokens, device = len(slots), slots.device
    rows = tile_rows(num_tokens)
    key = torch.where(slots < 0, num_slots, slots)
    order = torch.argsort(key, stable=True).to(torch.int32)
    counts = (key[:, None] == torch.arange(num_slots, device=device, dtype=key.dtype)).sum(0)
    ends, num_tiles = counts.cumsum(0), (counts + rows - 1) // rows
    tiles_to = num_tiles.cumsum(0)
    tile = torch.arange(-(-num_tokens // rows) + min(num_slots, num_tokens), device=device)
    slot = torch.searchsorted(tiles_to, tile, right=True)
    inside = slot.clamp(max=num_slots - 1)
    first = (ends - counts)[inside] + (tile - (tiles_to - num_tiles)[inside]) * rows
    has_slot = slot < num_slots
    found = torch.stack([torch.where(has_slot, slot, -1), first.clamp(min=0), torch.where(has_slot, ends[inside], 0)])
    return TokenAdapters(slots, order, found.to(torch.int32))


@triton.jit
def _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS: tl.constexpr):
    # Slot; places [ROWS] in sorted order; which of them there are; and the tokens that stand there.
    slot = tl.load(tiles_ptr + tile)
    place = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, ROWS)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    there = place < end  # nowhere, in a tile without a slot
    token = tl.load(order_ptr + place, mask=there, other=0)
    return slot, place, there, token.to(tl.int64)


# How many tokens and tiles there are differs from graph to graph, and is no constant: kernels would be compiled for each.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _shrink(
    x_ptr, stride_x, a_ptr, order_ptr, tiles_ptr, h_ptr, num_tokens, num_tiles,
    PARTS: tl.constexpr, RANK: tl.constexpr, IN: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [tokens, IN], a [slots, PARTS, RANK, IN] -> h [pieces, tokens as sorted, PARTS, RANK] float32: the sums over one PIECE.
    slot, place, there, token = _tile(order_ptr, tiles_ptr, tl.program_id(0), num_tiles, ROWS)
    part, piece = tl.program_id(1), tl.program_id(2)
    rank = tl.arange(0, RANK)
    depth = piece * PIECE + tl.arange(0, DEPTH)
    a_at = a_ptr + ((tl.maximum(slot, 0).to(tl.int64) * PARTS + part) * RANK + rank) * IN
    a = tl.load(a_at[:, None] + depth[None, :], mask=(depth < IN)[None, :], other=0.0)
    wait_for_previous(PDL)
    if slot < 0:
        return
    x_at = x_ptr + token * stride_x
    result = tl.zeros((ROWS, RANK), tl.float32)
    for offset in range(0, PIECE, DEPTH):
        inside = depth + offset < IN
        x = tl.load(x_at[:, None] + (depth + offset)[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        result = tl.dot(x, tl.trans(a), result, input_precision=PRECISION)
        after = (depth + offset + DEPTH < IN) & (offset + DEPTH < PIECE)
        a = tl.load(a_at[:, None] + (depth + offset + DEPTH)[None, :], mask=after[None, :], other=0.0)
    h_at = h_ptr + ((piece * num_tokens + place.to(tl.int64)) * PARTS + part) * RANK
    tl.store(h_at[:, None] + rank[None, :], result, mask=there[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _expand(
    h_ptr, b_ptr, scale_ptr, part_ptr, order_ptr, tiles_ptr, out_ptr, stride_out, num_tokens, num_tiles,
    PARTS: tl.constexpr, RANK: tl.constexpr, OUT: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # h as above, b [slots, OUT, RANK], scale [slots, PARTS], part [3, column tiles]: the part, first column and end of each
    # -> out [tokens, OUT] += scale * h b^T.
    slot, place, there, token = _tile(order_ptr, tiles_ptr, tl.program_id(0), num_tiles, ROWS)
    block, num_blocks = tl.program_id(1), tl.num_programs(1)
    part = tl.load(part_ptr + block)
    column = tl.load(part_ptr + num_blocks + block) + tl.arange(0, COLUMNS)
    inside = column < tl.load(part_ptr + 2 * num_blocks + block)
    rank = tl.arange(0, RANK)
    known = tl.maximum(slot, 0)
    scale = tl.load(scale_ptr + known * PARTS + part)
    b_at = b_ptr + (known.to(tl.int64) * OUT + column) * RANK
    b = tl.load(b_at[:, None] + rank[None, :], mask=inside[:, None], other=0.0)
    wait_for_previous(PDL)
    if slot < 0:
        return
    if scale == 0.0:
        return
    h = tl.zeros((ROWS, RANK), tl.float32)
    for piece in tl.static_range(PIECES):
        h_at = h_ptr + ((piece * num_tokens + place.to(tl.int64)) * PARTS + part) * RANK
        h += tl.load(h_at[:, None] + rank[None, :], mask=there[:, None], other=0.0)
    added = tl.dot((h * scale).to(b.dtype), tl.trans(b), input_precision=PRECISION)
    out_at = out_ptr + token[:, None] * stride_out + column[None, :]
    mask = there[:, None] & inside[None, :]
    given = tl.load(out_at, mask=mask, other=0.0)
    tl.store(out_at, (given.to(tl.float32) + added).to(given.dtype), mask=mask)


class _Share(NamedTuple):
    """On the host, where copies begin: a [PARTS, RANK, K], b [N, RANK], scale [PARTS]."""

    a: Tensor
    b: Tensor
    scale: Tensor


class TritonLoraSlots(LoraSlots):
    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape)
        self._rank = max(_LEAST_RANK, triton.next_power_of_2(shape.max_rank))
        num_parts, num_slots = len(shape.parts), shape.num_slots
        self._a = torch.zeros(num_slots, num_parts, self._rank, shape.in_features, dtype=dtype, device=device)
        self._b = torch.zeros(num_slots, shape.out_features, self._rank, dtype=dtype, device=device)
        self._scale = torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device)
        self._starts = [sum(shape.parts[:part]) for part in range(num_parts)]
        blocks = [
            (part, first, start + size)
            for part, (start, size) in enumerate(zip(self._starts, shape.parts, strict=True))
            for first in range(start, start + size, _COLUMNS)
        ]
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device).T.contiguous()
        self.nbytes = self._a.nbytes + self._b.nbytes
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._pinned = device.type == "cuda"

    def prepared(self, parts: Sequence[LoraPart]) -> _Share:
        """What lies in a slot whole, padding included, so that nothing is left of the adapter before."""
        a = torch.zeros(self._a.shape[1:], dtype=self._a.dtype, pin_memory=self._pinned)
        b = torch.zeros(self._b.shape[1:], dtype=self._b.dtype, pin_memory=self._pinned)
        scale = torch.zeros(self._scale.shape[1:], pin_memory=self._pinned)
        for part in parts:
            stop = part.start + len(part.b)
            for place, start in enumerate(self._starts):
                if part.start <= start < stop:  # one may change several of the layer's parts, by one A
                    a[place, : part.rank] = part.a
                    scale[place] = part.scale
            b[part.start : stop, : part.rank] = part.b
        return _Share(a, b, scale)

    def put(self, slot: int, share: _Share | None) -> None:
        if share is None:
            self._scale[slot].zero_()
            return
        for ours, given in zip((self._a, self._b, self._scale), share, strict=True):
            ours[slot].copy_(given, non_blocking=True)

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor) -> None:
        """Rows of x and out contiguous; x may be of a wider type than the adapters."""
        num_tokens = len(x)
        if not num_tokens:
            return
        assert adapters.order is not None
        assert adapters.tiles is not None
        num_tiles, num_blocks, num_parts = adapters.tiles.shape[1], self._blocks.shape[1], len(self.shape.parts)
        rows, size = tile_rows(num_tokens), self.shape.in_features
        pieces = 1 if num_tiles >= _MANY_TILES else min(_PIECES, triton.cdiv(size, _DEPTH))
        piece = triton.cdiv(triton.cdiv(size, pieces), _DEPTH) * _DEPTH
        pieces = triton.cdiv(size, piece)
        h = torch.empty(pieces, num_tokens, num_parts, self._rank, dtype=torch.float32, device=x.device)
        x = x if x.dtype == self._a.dtype else x.to(self._a.dtype)
        launch = overlap(x.device)
        _shrink[num_tiles, num_parts, pieces](
            x, x.stride(0), self._a, adapters.order, adapters.tiles, h, num_tokens, num_tiles,
            PARTS=num_parts, RANK=self._rank, IN=size, PIECE=piece, ROWS=rows, DEPTH=_DEPTH,
            PRECISION=self._precision, **launch,
        )  # fmt: skip
        _expand[num_tiles, num_blocks](
            h, self._b, self._scale, self._blocks, adapters.order, adapters.tiles, out, out.stride(0), num_tokens, num_tiles,
            PARTS=num_parts, RANK=self._rank, OUT=self.shape.out_features, PIECES=pieces,
            ROWS=rows, COLUMNS=_COLUMNS, PRECISION=self._precision, **launch,
        )  # fmt: skip
