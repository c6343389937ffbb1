"""Adapters in Triton: for each layer two kernels over tiles of one adapter's tokens (triton_index.py), behind the weight's own.

All that differs from step to step is read from device memory: which slot each token has, and so which tiles there are. The grid
follows from the number of tokens and slots alone, so one captured graph serves any mixture, none included: a program takes a tile,
and further ones while there are any. The first kernel shrinks the inputs for all parts of a layer, with the inner sum cut into
pieces where few tokens would leave the device idle; the second adds the pieces up, expands, and adds to what the weight gave, or,
behind gate and up, gates with that: nothing more is launched for the activation. Each output belongs to one program: the same bits
every time.

What takes the time of a decode step is how often a program waits for memory, one load behind another. So what the next tile needs
is asked for before the results of this one are.

What a kernel reads before it waits for the one before it: x, where the weight's own kernel lets it start when x is there
(`LinearWeight.matmul_first`), so that it shrinks beside that one's work; which tiles there are, which a kernel wrote as the step
began that let no later one begin early; and adapters, which copies wrote. A program without a tile ends at once, but for the
first, which waits: else whoever comes next would take what came before for done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.activation.triton_activation import activated
from ops.launch import overlap, wait_for_previous
from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters
from ops.lora.triton_index import index, tile_rows

# Programs of a launch, about, and of them side by side over tiles, where there is work for so many: beyond, each takes several.
_PROGRAMS = 2048
_TILES_AT_ONCE = 32
_PIECES = ((128, 16), (512, 4))  # of the inner sum, up to so many tokens
_FEWEST_PIECES = 2
_LEAST_RANK = 16  # of a matrix product
_ALIGNMENT = 16  # bytes, of what a slot's tensors begin at


@triton.jit
def _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS: tl.constexpr):
    # Slot, -1 for tokens without one, -2 for no tile; places [ROWS] in sorted order; which there are; the tokens that stand there.
    is_tile = tile < num_tiles
    slot = tl.load(tiles_ptr + tile, mask=is_tile, other=-2)
    place = tl.load(tiles_ptr + num_tiles + tile, mask=is_tile, other=0) + tl.arange(0, ROWS)
    there = place < tl.load(tiles_ptr + 2 * num_tiles + tile, mask=is_tile, other=0)
    token = tl.load(order_ptr + place, mask=there, other=0)
    return slot, place, there, token.to(tl.int64)


@triton.jit
def _inner(a_ptr, stride_a, slot, row, depth, IN: tl.constexpr):
    # Columns `depth` of rows `row` of the slot's a [PARTS * RANK, IN]; zeros where there is no slot.
    at = a_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_a + row * IN
    wanted = depth < tl.where(slot >= 0, IN, 0)
    return tl.load(at[:, None] + depth[None, :], mask=wanted[None, :], other=0.0)


# How many tokens and tiles there are differs from graph to graph, and is no constant: kernels would be compiled for each.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _shrink(
    x_ptr, stride_x, a_ptr, stride_a, order_ptr, tiles_ptr, h_ptr, num_tokens, num_tiles,
    PARTS: tl.constexpr, RANK: tl.constexpr, IN: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [tokens, IN], a [slots, PARTS, RANK, IN] -> h [pieces, tokens as sorted, PARTS, RANK] float32: the sums over one PIECE.
    # EARLY: the kernel before this one lets it start when x is there, and it waits only before it writes.
    part, piece, tile = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    slot, place, there, token = _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS)
    if (slot < 0) & (tl.program_id(0) + tile > 0):
        return
    rank, depth = tl.arange(0, RANK), piece * PIECE + tl.arange(0, DEPTH)
    row = part * RANK + rank
    a = _inner(a_ptr, stride_a, slot, row, depth, IN)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    else:
        wait_for_previous(PDL)
    while slot >= 0:
        x_at = x_ptr + token[:, None] * stride_x
        mask = there[:, None] & (depth < IN)[None, :]
        x = tl.load(x_at + depth[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        tile += tl.num_programs(1)
        next_slot, next_place, next_there, next_token = _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS)
        result = tl.dot(x, tl.trans(a), input_precision=PRECISION)
        for offset in range(DEPTH, PIECE, DEPTH):
            a = _inner(a_ptr, stride_a, slot, row, depth + offset, IN)
            inside = depth + offset < IN
            mask = there[:, None] & inside[None, :]
            x = tl.load(x_at + (depth + offset)[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            result = tl.dot(x, tl.trans(a), result, input_precision=PRECISION)
        a = _inner(a_ptr, stride_a, next_slot, row, depth, IN)
        if EARLY:
            wait_for_previous(PDL)
        h_at = h_ptr + ((piece * num_tokens + place.to(tl.int64)) * PARTS + part) * RANK
        tl.store(h_at[:, None] + rank[None, :], result, mask=there[:, None])
        slot, place, there, token = next_slot, next_place, next_there, next_token
    if EARLY:
        wait_for_previous(PDL)  # the first program, where nobody has an adapter


@triton.jit
def _summed(
    h_ptr,
    place,
    there,
    part,
    num_tokens,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # The sum of h's pieces, [ROWS, RANK] float32.
    rank = tl.arange(0, RANK)
    h = tl.zeros((ROWS, RANK), tl.float32)
    for piece in tl.static_range(PIECES):
        h_at = h_ptr + ((piece * num_tokens + place.to(tl.int64)) * PARTS + part) * RANK
        h += tl.load(h_at[:, None] + rank[None, :], mask=there[:, None], other=0.0)
    return h


@triton.jit
def _outer(b_ptr, stride_b, slot, column, end, RANK: tl.constexpr):
    # Rows `column`, those before `end`, of the slot's b [outputs, RANK]; zeros where there is no slot.
    at = b_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_b + column * RANK
    wanted = column < tl.where(slot >= 0, end, 0)
    return tl.load(at[:, None] + tl.arange(0, RANK)[None, :], mask=wanted[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _expand(
    h_ptr, b_ptr, stride_b, scale_ptr, stride_scale, part_ptr, order_ptr, tiles_ptr, out_ptr, stride_out,
    num_tokens, num_tiles, PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # h as above, b [slots, outputs, RANK], scale [slots, PARTS], part [3, column tiles]: the part, first column and end of each
    # -> out [tokens, outputs] += scale * h b^T.
    block, num_blocks, tile = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    slot, place, there, token = _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS)
    part = tl.load(part_ptr + block)
    column = tl.load(part_ptr + num_blocks + block) + tl.arange(0, COLUMNS)
    end = tl.load(part_ptr + 2 * num_blocks + block)
    if (slot < 0) & (block + tile > 0):
        return
    inside = column < end
    b = _outer(b_ptr, stride_b, slot, column, end, RANK)
    scale = tl.load(scale_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_scale + part)
    wait_for_previous(PDL)
    while slot >= 0:
        out_at = out_ptr + token[:, None] * stride_out + column[None, :]
        mask = there[:, None] & inside[None, :]
        given = tl.load(out_at, mask=mask, other=0.0)
        h = _summed(h_ptr, place, there, part, num_tokens, PARTS, RANK, PIECES, ROWS)
        tile += tl.num_programs(1)
        next_slot, next_place, next_there, next_token = _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS)
        added = tl.dot((h * scale).to(b.dtype), tl.trans(b), input_precision=PRECISION)
        b = _outer(b_ptr, stride_b, next_slot, column, end, RANK)
        scale = tl.load(scale_ptr + tl.maximum(next_slot, 0).to(tl.int64) * stride_scale + part)
        tl.store(out_at, (given.to(tl.float32) + added).to(given.dtype), mask=mask)
        slot, place, there, token = next_slot, next_place, next_there, next_token


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _expand_gated(
    h_ptr, b_ptr, stride_b, scale_ptr, stride_scale, order_ptr, tiles_ptr, gate_up_ptr, out_ptr, num_tokens, num_tiles,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # h, b and scale of two parts -> out [tokens, WIDTH] = silu(gate) * up of gate_up [tokens, 2 * WIDTH] + scale * h b^T, for all
    # tokens, those without an adapter too, which have tiles of their own, the last.
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    column, tile = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    slot, place, there, token = _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS)
    if (slot < -1) & (tl.program_id(0) + tile > 0):
        return
    inside = column < WIDTH
    gate_b = _outer(b_ptr, stride_b, slot, column, WIDTH, RANK)
    up_b = _outer(b_ptr, stride_b, slot, column + WIDTH, 2 * WIDTH, RANK)
    wait_for_previous(PDL)
    while slot >= -1:
        at = gate_up_ptr + token[:, None] * (2 * WIDTH) + column[None, :]
        mask = there[:, None] & inside[None, :]
        gate, up = tl.load(at, mask=mask, other=0.0), tl.load(at + WIDTH, mask=mask, other=0.0)
        with_adapter = there & (place < tl.where(slot >= 0, num_tokens, 0))
        of_gate = _summed(h_ptr, place, with_adapter, 0, num_tokens, 2, RANK, PIECES, ROWS)
        of_up = _summed(h_ptr, place, with_adapter, 1, num_tokens, 2, RANK, PIECES, ROWS)
        scale_at = scale_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_scale
        of_gate, of_up = of_gate * tl.load(scale_at), of_up * tl.load(scale_at + 1)
        tile += tl.num_programs(1)
        next_slot, next_place, next_there, next_token = _tile(order_ptr, tiles_ptr, tile, num_tiles, ROWS)
        gate = gate.to(tl.float32) + tl.dot(of_gate.to(gate_b.dtype), tl.trans(gate_b), input_precision=PRECISION)
        up = up.to(tl.float32) + tl.dot(of_up.to(up_b.dtype), tl.trans(up_b), input_precision=PRECISION)
        gate_b = _outer(b_ptr, stride_b, next_slot, column, WIDTH, RANK)
        up_b = _outer(b_ptr, stride_b, next_slot, column + WIDTH, 2 * WIDTH, RANK)
        # Rounded as what the weight gives is where nothing is added.
        result = activated(gate.to(KIND).to(tl.float32), "silu") * up.to(KIND).to(tl.float32)
        tl.store(out_ptr + token[:, None] * WIDTH + column[None, :], result.to(KIND), mask=mask)
        slot, place, there, token = next_slot, next_place, next_there, next_token


class _Views(NamedTuple):
    """A slot, or all of them, as they lie in memory: a [..., PARTS, RANK, K], b [..., N, RANK], scale [..., PARTS] float32."""

    a: Tensor
    b: Tensor
    scale: Tensor


class TritonLoraSlots(LoraSlots):
    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape)
        self._dtype, self._device = dtype, device
        self._rank = max(_LEAST_RANK, triton.next_power_of_2(shape.max_rank))
        # Of a program: what it multiplies at a time, in shared memory and registers; columns of small tiles and of large ones.
        self._depth, self._columns = (256, (128, 64)) if self._rank <= 32 else (64, (64, 32))
        num_parts = len(shape.parts)
        self._starts = [sum(shape.parts[:part]) for part in range(num_parts)]
        self._blocks = {columns: self._cut(columns) for columns in self._columns}
        self._is_pair = num_parts == 2 and shape.parts[0] == shape.parts[1]
        self._sizes = num_parts * self._rank * shape.in_features, shape.out_features * self._rank
        used = sum(self._sizes) * dtype.itemsize + 4 * num_parts
        self.slot_bytes = -(-used // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = shape.num_slots * self.slot_bytes
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._bound: _Views | None = None

    def _cut(self, columns: int) -> Tensor:
        """The part, first column and end of each program's tile of columns, [3, tiles] int32."""
        blocks = [
            (part, first, start + size)
            for part, (start, size) in enumerate(zip(self._starts, self.shape.parts, strict=True))
            for first in range(start, start + size, columns)
        ]
        return torch.tensor(blocks, dtype=torch.int32, device=self._device).T.contiguous()

    def bind(self, memory: Tensor) -> None:
        self._bound = self._views(memory)

    def _views(self, memory: Tensor) -> _Views:
        """memory [..., slot_bytes] uint8: the last dim is contiguous."""
        of_a, of_b = (size * self._dtype.itemsize for size in self._sizes)
        num_parts, lead = len(self.shape.parts), memory.shape[:-1]
        a = memory[..., :of_a].view(self._dtype).view(*lead, num_parts, self._rank, self.shape.in_features)
        b = memory[..., of_a : of_a + of_b].view(self._dtype).view(*lead, self.shape.out_features, self._rank)
        return _Views(a, b, memory[..., of_a + of_b : of_a + of_b + 4 * num_parts].view(torch.float32))

    def _slots(self) -> _Views:
        if self._bound is None:  # nobody has given it memory
            size = self.shape.num_slots, self.slot_bytes
            self.bind(torch.zeros(size, dtype=torch.uint8, device=self._device))
        assert self._bound is not None
        return self._bound

    def prepared(self, parts: Sequence[LoraPart]) -> Tensor:
        memory = torch.zeros(self.slot_bytes, dtype=torch.uint8)
        self.write(parts, memory)
        return memory

    def write(self, parts: Sequence[LoraPart], memory: Tensor) -> None:
        """What lies in a slot whole, padding included, so that nothing is left of the adapter before."""
        a, b, scale = self._views(memory)
        for part in parts:
            stop = part.start + len(part.b)
            for place, start in enumerate(self._starts):
                if part.start <= start < stop:  # one may change several of the layer's parts, by one A
                    a[place, : part.rank] = part.a
                    scale[place] = part.scale
            b[part.start : stop, : part.rank] = part.b

    def put(self, slot: int, share: Tensor | None) -> None:
        if share is None:
            self._slots().scale[slot].zero_()
            return
        for ours, given in zip(self._slots(), self._views(share), strict=True):
            ours[slot].copy_(given)

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, *, early: bool = False) -> None:
        """Rows of x and out contiguous; x may be of a wider type than the adapters."""
        if not len(out):
            return
        h, (order, tiles), (_, b, scale) = self._shrunk(x, adapters, early), _known(adapters), self._slots()
        columns = self._columns_of(len(out))
        blocks = self._blocks[columns]
        _expand[_grid(blocks.shape[1], tiles)](
            h, b, b.stride(0), scale, scale.stride(0), blocks, order, tiles, out, out.stride(0), len(out), tiles.shape[1],
            PARTS=len(self.shape.parts), RANK=self._rank, PIECES=len(h), ROWS=tile_rows(len(out)), COLUMNS=columns,
            PRECISION=self._precision, **overlap(out.device),
        )  # fmt: skip

    def gated(self, x: Tensor, adapters: TokenAdapters, gate_up: Tensor, *, early: bool = False) -> Tensor | None:
        if not self._is_pair:
            return None
        width = self.shape.parts[0]
        out = gate_up.new_empty(len(gate_up), width)
        if len(out):
            h, (order, tiles), (_, b, scale) = self._shrunk(x, adapters, early), _known(adapters), self._slots()
            columns = self._columns_of(len(out)) // 2
            _expand_gated[_grid(triton.cdiv(width, columns), tiles)](
                h, b, b.stride(0), scale, scale.stride(0), order, tiles, gate_up.contiguous(), out, len(out),
                tiles.shape[1], RANK=self._rank, WIDTH=width, PIECES=len(h), ROWS=tile_rows(len(out)), COLUMNS=columns,
                PRECISION=self._precision, **overlap(out.device),
            )  # fmt: skip
        return out

    def _shrunk(self, x: Tensor, adapters: TokenAdapters, early: bool) -> Tensor:
        """h [pieces, T as sorted, parts, rank] float32."""
        self._compile(x)
        num_tokens, size, num_parts = len(x), self.shape.in_features, len(self.shape.parts)
        most = next((pieces for tokens, pieces in _PIECES if num_tokens <= tokens), _FEWEST_PIECES)
        piece = triton.cdiv(triton.cdiv(size, most), self._depth) * self._depth
        pieces = triton.cdiv(size, piece)
        h = torch.empty(pieces, num_tokens, num_parts, self._rank, dtype=torch.float32, device=x.device)
        (order, tiles), a = _known(adapters), self._slots().a
        if x.dtype != self._dtype:
            x, early = x.to(self._dtype), False
        how = overlap(x.device)
        _shrink[_grid(num_parts * pieces, tiles)](
            x, x.stride(0), a, a.stride(0), order, tiles, h, num_tokens, tiles.shape[1],
            PARTS=num_parts, RANK=self._rank, IN=size, PIECE=piece, ROWS=tile_rows(num_tokens), DEPTH=self._depth,
            PRECISION=self._precision, EARLY=early and how["PDL"], **how,
        )  # fmt: skip
        return h

    def _columns_of(self, num_tokens: int) -> int:
        return self._columns[tile_rows(num_tokens) > tile_rows(1)]

    def _compile(self, x: Tensor) -> None:
        """Run every kernel that any number of tokens will need, once a shape: none is left to be compiled in a capture."""
        key = self.shape, self._dtype, x.dtype, x.device
        if x.device.type != "cuda" or key in _compiled:
            return
        _compiled.add(key)
        for num_tokens in (1, *(tokens + 1 for tokens, _ in _PIECES)):
            some = x.new_zeros(num_tokens, self.shape.in_features)
            adapters = index(torch.zeros(num_tokens, dtype=torch.int32, device=x.device), self.shape.num_slots)
            out = x.new_zeros(num_tokens, self.shape.out_features)
            for early in (False, True):
                self.add(some, adapters, out, early=early)
                self.gated(some, adapters, out, early=early)


_compiled: set[tuple[LoraShape, torch.dtype, torch.dtype, torch.device]] = set()


def _known(adapters: TokenAdapters) -> tuple[Tensor, Tensor]:
    assert adapters.order is not None
    assert adapters.tiles is not None
    return adapters.order, adapters.tiles


def _grid(across: int, tiles: Tensor) -> tuple[int, int]:
    """Programs for each tile that there may be, but not more than do any good: then each takes several."""
    return across, min(tiles.shape[1], _TILES_AT_ONCE, triton.cdiv(_PROGRAMS, across))
