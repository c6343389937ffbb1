"""LoRA in Triton: two kernels per layer over tiles of one adapter's tokens (triton_index.py), after the weight's own.

Slots and tiles of a step are read from device memory. The grid depends on the number of tokens and slots only, so one captured
graph serves any mixture, including none: a program takes a tile, and then further ones. The first kernel shrinks the inputs for all
parts of a layer, with split-K if few tokens would leave the device idle. The second sums the splits, expands, and adds to the
weight's output; after gate and up it also applies the activation, without another launch. Each output belongs to one program, so
results are bit-reproducible. Few tokens in 16 bits on Hopper use few_tokens.cu, with the same two steps over the same tiles.

Before waiting for its predecessor, a kernel reads only data that is complete: the tiles, whose kernel does not allow early launch,
and adapters, which copies wrote. A program without a tile ends at once, except the first one, which waits: otherwise the next
kernel would consider the predecessor finished."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.triton_activation import activated
from ops.gemm import low_rank, tiled_plus
from ops.launch import overlap, wait_for_previous
from ops.lora import few_tokens
from ops.lora.few_tokens import Sorted
from ops.lora.share import LoraShape, TokenAdapters
from ops.lora.slot_memory import ExpertSlots, SlotMemory
from ops.lora.triton_index import index, tile_rows

_PROGRAMS = 2048  # approximate maximum per launch: the capacity of a device
_PIECES = ((128, 16), (512, 8))  # splits of the inner sum, by maximum number of tokens
_FEWEST_PIECES = 4


@triton.jit
def _tile(order_ptr, tiles_ptr, tile, num_used, num_tiles, ROWS: tl.constexpr):
    # Slot, -1 for none; positions [ROWS] in sorted order; which of them are valid; and their tokens.
    is_used = tile < num_used
    slot = tl.load(tiles_ptr + tile, mask=is_used, other=-1)
    place = tl.load(tiles_ptr + num_tiles + tile, mask=is_used, other=0) + tl.arange(0, ROWS)
    there = place < tl.load(tiles_ptr + 2 * num_tiles + tile, mask=is_used, other=0)
    token = tl.load(order_ptr + place, mask=there, other=0)
    return slot, place, there, token.to(tl.int64)


# The numbers of tokens and tiles differ between graphs and are no constants: otherwise kernels would be compiled for each.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _shrink(
    x_ptr, stride_x, a_ptr, stride_a, order_ptr, tiles_ptr, used_ptr, h_ptr, num_tokens, num_tiles,
    PARTS: tl.constexpr, RANK: tl.constexpr, IN: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [tokens, IN], a [slots, PARTS, RANK, IN] -> h [pieces, tokens as sorted, PARTS, RANK] float32: the sums over one PIECE.
    part, piece, first = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    num_used = tl.load(used_ptr)
    if (first >= num_used) & (tl.program_id(0) + first > 0):
        return
    rank, depth = tl.arange(0, RANK), piece * PIECE + tl.arange(0, DEPTH)
    slot, place, there, token = _tile(order_ptr, tiles_ptr, first, num_used, num_tiles, ROWS)
    a_at = a_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_a + (part * RANK + rank) * IN
    a = tl.load(a_at[:, None] + depth[None, :], mask=(depth < IN)[None, :], other=0.0)
    wait_for_previous(PDL)
    for tile in range(first, num_used, tl.num_programs(1)):
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
        slot, place, there, token = _tile(order_ptr, tiles_ptr, tile + tl.num_programs(1), num_used, num_tiles, ROWS)
        a_at = a_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_a + (part * RANK + rank) * IN
        wanted = depth < tl.where(slot >= 0, IN, 0)
        a = tl.load(a_at[:, None] + depth[None, :], mask=wanted[None, :], other=0.0)


@triton.jit
def _added(
    h_ptr, b, scale, place, there, part, num_tokens,
    PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # scale * (the sum of h's pieces) b^T, [ROWS, columns] float32.
    rank = tl.arange(0, RANK)
    h = tl.zeros((ROWS, RANK), tl.float32)
    for piece in tl.static_range(PIECES):
        h_at = h_ptr + ((piece * num_tokens + place.to(tl.int64)) * PARTS + part) * RANK
        h += tl.load(h_at[:, None] + rank[None, :], mask=there[:, None], other=0.0)
    return tl.dot((h * scale).to(b.dtype), tl.trans(b), input_precision=PRECISION)


@triton.jit
def _matrix(b_ptr, stride_b, slot, column, end, RANK: tl.constexpr):
    # Rows `column`, if below `end`, of the slot's b [outputs, RANK]; zeros without a slot.
    at = b_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_b + column * RANK
    wanted = column < tl.where(slot >= 0, end, 0)
    return tl.load(at[:, None] + tl.arange(0, RANK)[None, :], mask=wanted[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _expand(
    h_ptr, b_ptr, stride_b, scale_ptr, stride_scale, part_ptr, order_ptr, tiles_ptr, used_ptr, out_ptr, stride_out,
    num_tokens, num_tiles, PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # h as above, b [slots, outputs, RANK], scale [slots, PARTS], part [3, column tiles]: the part, first column and end of each
    # -> out [tokens, outputs] += scale * h b^T.
    block, num_blocks, first = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    num_used = tl.load(used_ptr)
    if (first >= num_used) & (block + first > 0):
        return
    part = tl.load(part_ptr + block)
    column = tl.load(part_ptr + num_blocks + block) + tl.arange(0, COLUMNS)
    end = tl.load(part_ptr + 2 * num_blocks + block)
    inside = column < end
    slot, place, there, token = _tile(order_ptr, tiles_ptr, first, num_used, num_tiles, ROWS)
    b = _matrix(b_ptr, stride_b, slot, column, end, RANK)
    scale = tl.load(scale_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_scale + part)
    wait_for_previous(PDL)
    for tile in range(first, num_used, tl.num_programs(1)):
        if scale != 0.0:
            out_at = out_ptr + token[:, None] * stride_out + column[None, :]
            mask = there[:, None] & inside[None, :]
            given = tl.load(out_at, mask=mask, other=0.0)
            added = _added(h_ptr, b, scale, place, there, part, num_tokens, PARTS, RANK, PIECES, ROWS, PRECISION)
            tl.store(out_at, (given.to(tl.float32) + added).to(given.dtype), mask=mask)
        slot, place, there, token = _tile(order_ptr, tiles_ptr, tile + tl.num_programs(1), num_used, num_tiles, ROWS)
        b = _matrix(b_ptr, stride_b, slot, column, end, RANK)
        scale = tl.load(scale_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_scale + part)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _expand_gated(
    h_ptr, b_ptr, stride_b, scale_ptr, stride_scale, order_ptr, tiles_ptr, used_ptr, gate_up_ptr, out_ptr, num_tokens, num_tiles,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # h, b and scale of two parts -> out [tokens, WIDTH] = silu(gate) * up of gate_up [tokens, 2 * WIDTH] + scale * h b^T, for all
    # tokens, those without an adapter too, which have tiles of their own, the last.
    column, first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    num_used = tl.load(used_ptr + 1)
    if (first >= num_used) & (tl.program_id(0) + first > 0):
        return
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    inside = column < WIDTH
    slot, place, there, token = _tile(order_ptr, tiles_ptr, first, num_used, num_tiles, ROWS)
    gate_b = _matrix(b_ptr, stride_b, slot, column, WIDTH, RANK)
    up_b = _matrix(b_ptr, stride_b, slot, column + WIDTH, 2 * WIDTH, RANK)
    wait_for_previous(PDL)
    for tile in range(first, num_used, tl.num_programs(1)):
        at = gate_up_ptr + token[:, None] * (2 * WIDTH) + column[None, :]
        mask = there[:, None] & inside[None, :]
        gate, up = tl.load(at, mask=mask, other=0.0), tl.load(at + WIDTH, mask=mask, other=0.0)
        if slot >= 0:
            scale_at = scale_ptr + slot.to(tl.int64) * stride_scale
            of_gate, of_up = tl.load(scale_at), tl.load(scale_at + 1)
            added = _added(h_ptr, gate_b, of_gate, place, there, 0, num_tokens, 2, RANK, PIECES, ROWS, PRECISION)
            gate = (gate.to(tl.float32) + added).to(KIND)
            added = _added(h_ptr, up_b, of_up, place, there, 1, num_tokens, 2, RANK, PIECES, ROWS, PRECISION)
            up = (up.to(tl.float32) + added).to(KIND)
        result = activated(gate.to(tl.float32), "silu") * up.to(tl.float32)
        tl.store(out_ptr + token[:, None] * WIDTH + column[None, :], result.to(KIND), mask=mask)
        slot, place, there, token = _tile(order_ptr, tiles_ptr, tile + tl.num_programs(1), num_used, num_tiles, ROWS)
        gate_b = _matrix(b_ptr, stride_b, slot, column, WIDTH, RANK)
        up_b = _matrix(b_ptr, stride_b, slot, column + WIDTH, 2 * WIDTH, RANK)


class TritonLoraSlots(SlotMemory):
    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        # Number of elements that a program multiplies at a time, in shared memory and registers.
        self._depth, self._columns = (256, 128) if self._rank <= 32 else (64, 32)
        self._few = few_tokens.fits(shape, self._rank, dtype, device)
        if self._few:
            few_tokens.compile_ahead(self._rank, dtype, device)
        self._ends = {
            gated: self._few and tiled_plus.fits(shape.parts, self._rank, gated=gated) for gated in (False, True)
        }
        if any(self._ends.values()):
            tiled_plus.compile_ahead(self._rank, dtype, device)
        self._blocks = self._cut(self._columns)
        self._few_blocks = {columns: self._cut(columns) for columns in few_tokens.COLUMNS} if self._few else {}
        self._is_pair = len(shape.parts) == 2 and shape.parts[0] == shape.parts[1]
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    def _cut(self, columns: int) -> Tensor:
        """Return the part, first column and end of each program's tile of columns, [3, tiles] int32."""
        blocks = [
            (part, first, start + size)
            for part, (start, size) in enumerate(zip(self._starts, self.shape.parts, strict=True))
            for first in range(start, start + size, columns)
        ]
        return torch.tensor(blocks, dtype=torch.int32, device=self._device).T.contiguous()

    def begin(self, x: Tensor, adapters: TokenAdapters) -> few_tokens.Shrunk | None:
        """Start shrinking x. The weight's result must have x's dtype and separate memory, as in all models."""
        return few_tokens.begin(x, self.slots, _known(adapters)) if self._takes_few(x) else None

    def low_rank(self, x: Tensor, adapters: TokenAdapters, *, gated: bool) -> low_rank.LowRank | None:
        if not (self._ends[gated] and self._takes_few(x)):
            return None
        (order, tiles, used), (_, b, scale) = _known(adapters), self.slots
        h = few_tokens.shrunk(x, self.slots, _known(adapters)).h
        parts = self._few_blocks[low_rank.COLUMNS][0]
        return low_rank.LowRank(h, b, scale, adapters.slots, order, tiles, used, parts)

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: few_tokens.Shrunk | None = None) -> None:
        """Add adapters, see `LoraSlots.add`. Rows of x and out are contiguous; x may be of a wider dtype than adapters."""
        if not len(out):
            return
        self._compile(x)
        if begun is None and self._takes_few(x) and self._is_taken(out):
            begun = few_tokens.shrunk(x, self.slots, _known(adapters))
        if begun is not None:
            blocks = self._few_blocks[few_tokens.columns(self._rank, len(x))]
            few_tokens.expand(begun, self.slots, _known(adapters), blocks, out)
            return
        h, (order, tiles, used), (_, b, scale) = self._shrunk(x, adapters), _known(adapters), self.slots
        _expand[_grid(self._blocks.shape[1], tiles)](
            h, b, b.stride(0), scale, scale.stride(0), self._blocks, order, tiles, used, out, out.stride(0),
            len(out), tiles.shape[1], PARTS=len(self.shape.parts), RANK=self._rank, PIECES=len(h),
            ROWS=tile_rows(len(out)), COLUMNS=self._columns, PRECISION=self._precision, **overlap(out.device),
        )  # fmt: skip

    def gated(
        self, x: Tensor, adapters: TokenAdapters, gate_up: Tensor, begun: few_tokens.Shrunk | None = None
    ) -> Tensor | None:
        if not self._is_pair:
            return None
        width = self.shape.parts[0]
        out = gate_up.new_empty(len(gate_up), width)
        self._compile(x)
        if begun is None and self._takes_few(x) and self._is_taken(gate_up):
            begun = few_tokens.shrunk(x, self.slots, _known(adapters))
        if begun is not None:
            few_tokens.expand_gated(begun, self.slots, _known(adapters), gate_up.contiguous(), out)
        elif len(out):
            h, (order, tiles, used), (_, b, scale) = self._shrunk(x, adapters), _known(adapters), self.slots
            _expand_gated[_grid(triton.cdiv(width, self._columns), tiles)](
                h, b, b.stride(0), scale, scale.stride(0), order, tiles, used, gate_up.contiguous(), out, len(out),
                tiles.shape[1], RANK=self._rank, WIDTH=width, PIECES=len(h), ROWS=tile_rows(len(out)),
                COLUMNS=self._columns, PRECISION=self._precision, **overlap(out.device),
            )  # fmt: skip
        return out

    def _takes_few(self, x: Tensor) -> bool:
        return self._few and 0 < len(x) <= few_tokens.MAX_TOKENS and x.stride(0) % 8 == 0 and self._is_taken(x)

    def _is_taken(self, x: Tensor) -> bool:
        return x.dtype == self._dtype and x.data_ptr() % 16 == 0

    def _shrunk(self, x: Tensor, adapters: TokenAdapters) -> Tensor:
        num_tokens, size, num_parts = len(x), self.shape.in_features, len(self.shape.parts)
        most = next((pieces for tokens, pieces in _PIECES if num_tokens <= tokens), _FEWEST_PIECES)
        piece = triton.cdiv(triton.cdiv(size, most), self._depth) * self._depth
        pieces = triton.cdiv(size, piece)
        h = torch.empty(pieces, num_tokens, num_parts, self._rank, dtype=torch.float32, device=x.device)
        (order, tiles, used), a = _known(adapters), self.slots.a
        x = x if x.dtype == self._dtype else x.to(self._dtype)
        _shrink[_grid(num_parts * pieces, tiles)](
            x, x.stride(0), a, a.stride(0), order, tiles, used, h, num_tokens, tiles.shape[1],
            PARTS=num_parts, RANK=self._rank, IN=size, PIECE=piece, ROWS=tile_rows(num_tokens), DEPTH=self._depth,
            PRECISION=self._precision, **overlap(x.device),
        )  # fmt: skip
        return h

    def _compile(self, x: Tensor) -> None:
        """Run every kernel that any number of tokens will need, once per shape, so that a capture compiles none."""
        key = self.shape, self._dtype, x.dtype, x.device
        if x.device.type != "cuda" or key in _compiled:
            return
        _compiled.add(key)
        for num_tokens in (1, *(tokens + 1 for tokens, _ in _PIECES)):
            some = x.new_zeros(num_tokens, self.shape.in_features)
            adapters = index(torch.zeros(num_tokens, dtype=torch.int32, device=x.device), self.shape.num_slots)
            out = x.new_zeros(num_tokens, self.shape.out_features)
            self.add(some, adapters, out)
            self.gated(some, adapters, out)


def prepare(shape: LoraShape, dtype: torch.dtype, device: torch.device) -> SlotMemory:
    return (ExpertSlots if shape.of_expert else TritonLoraSlots)(shape, dtype, device)


_compiled: set[tuple[LoraShape, torch.dtype, torch.dtype, torch.device]] = set()


def _known(adapters: TokenAdapters) -> Sorted:
    assert adapters.order is not None
    assert adapters.tiles is not None
    assert adapters.used is not None
    return Sorted(adapters.order, adapters.tiles, adapters.used)


def _grid(across: int, tiles: Tensor) -> tuple[int, int]:
    """Return a grid with programs for all possible tiles, limited to the device's capacity; beyond it a program takes several."""
    return across, min(tiles.shape[1], triton.cdiv(_PROGRAMS, across))
