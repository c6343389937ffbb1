"""Linear layers on Hopper whose weight is in four bits, of any number of rows: the codes stream past the matrix units, which
take them out of registers (tiled_w4.cu).

The weight is laid once in pieces, in which each lane finds its codes side by side, and the scales behind them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.cuda.program import CompiledKernel, Program
from ops.cuda.tensor_map import tensor_map
from ops.gemm import warpgroups

_HERE = Path(__file__).parent
CHUNK = 128  # columns
PIECE_ROWS = 32
_BOX = 64  # columns of x in one copy
GROUPS = (1, 2, 4)  # scales of a row in a chunk


@dataclass(frozen=True, slots=True)
class Tile:
    """One instance of tiled_w4.cu: `rows` of x by 64 times `wgs` rows of the weight, `stages` chunks under way, `blocks` of
    it on a multiprocessor, for a weight with so many `groups` in a chunk. `scaled`: scales meet rounded numbers, not sums."""

    rows: int
    wgs: int
    stages: int
    blocks: int
    groups: int
    scaled: bool
    gated: bool

    @property
    def name(self) -> str:
        sizes = self.rows, self.wgs, self.stages, self.blocks, self.groups, int(self.scaled), int(self.gated)
        return "_".join(map(str, ("tiled_w4", *sizes)))

    @property
    def source(self) -> str:
        sizes = self.rows, self.wgs, self.stages, self.groups, int(self.scaled), int(self.gated)
        registers = warpgroups.registers(self.rows, self.wgs, self.blocks)
        words = self.name, *sizes, self.blocks, self.threads, registers
        return f"TILED_W4({', '.join(map(str, words))})"

    @property
    def threads(self) -> int:
        return warpgroups.threads(self.rows, self.wgs)

    @property
    def shared_bytes(self) -> int:
        return self.stages * _stage_bytes(self.rows, self.wgs, self.groups) + warpgroups.ALIGNMENT


def _stage_bytes(rows: int, wgs: int, groups: int) -> int:
    return rows * CHUNK * 2 + 2 * wgs * piece_bytes(groups)


def piece_bytes(groups: int) -> int:
    return PIECE_ROWS * (CHUNK // 2 + groups * 4)


def groups_of_chunk(in_features: int, groups: int) -> int | None:
    """Scales of a row in a chunk, for `groups` in all; None where no instance has so many."""
    if groups == 1:
        return 1
    group, rest = divmod(in_features, groups)
    if rest or (group % CHUNK and CHUNK % group):
        return None
    found = max(1, CHUNK // group)
    return found if found in GROUPS else None


def fits(out_features: int, in_features: int, groups: int) -> bool:
    return out_features % 16 == 0 and in_features % 8 == 0 and groups_of_chunk(in_features, groups) is not None


def can_gate(out_features: int) -> bool:
    """Whether gates and ups are whole pieces."""
    return out_features % (2 * PIECE_ROWS) == 0


def groups_of(pieces: Tensor) -> int:
    """Scales of a row in a chunk."""
    return (pieces.shape[-1] // PIECE_ROWS - CHUNK // 2) // 4


def in_pieces(codes: Tensor, words: Tensor) -> Tensor:
    """codes [N, K] uint8 and words [groups, N] int32 (a float32 without its last 8 bits, in which the zero point is) -> pieces
    [N / 32, chunks of K, bytes], `fits`. What stands beyond N and K is worth nothing.

    In a row's 64 bytes lane t has 16: of word i the bits 4 p and on of the half h are column 32 i + 8 p + 2 t + h."""
    (out_features, in_features), num_groups = codes.shape, words.shape[0]
    groups = groups_of_chunk(in_features, num_groups)
    assert groups is not None
    chunks = -(-in_features // CHUNK)
    padding = -out_features % PIECE_ROWS
    padded = functional.pad(codes, (0, chunks * CHUNK - in_features, 0, padding))
    pieces = padded.view(-1, PIECE_ROWS, chunks, 4, 4, 4, 2)  # [piece, row, chunk, i, p, t, h]
    halves = pieces.permute(0, 2, 1, 5, 3, 6, 4)  # [piece, chunk, row, t, i, h, p]
    packed = (halves[..., 0::2] | halves[..., 1::2] << 4).reshape(len(pieces), chunks, -1)
    first_columns = torch.arange(chunks * groups, device=words.device) * (CHUNK // groups)
    per_chunk = words[(first_columns // (in_features // num_groups)).clamp_(max=num_groups - 1)]
    per_chunk = functional.pad(per_chunk, (0, padding))
    scales = per_chunk.view(chunks, groups, -1, PIECE_ROWS).permute(2, 0, 1, 3).contiguous()
    return torch.cat([packed, scales.view(torch.uint8).reshape(len(pieces), chunks, -1)], dim=2)


def tiled_w4(
    x: Tensor, pieces: Tensor, out_features: int, bias: Tensor | None, *, gated: bool,
    tile: Tile | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] -> [M, N], or [M, N / 2] if `gated`. pieces: as of `in_pieces`.

    `splits`: into so many parts K is cut, up to 8, and no more than K has chunks."""
    num_rows, in_features = x.shape
    x = x.contiguous()
    groups = groups_of(pieces)
    if tile is None or splits is None:
        compile_ahead(in_features, out_features, groups, gated, x.dtype, x.device)
        tile, splits = choose(num_rows, in_features, out_features, groups, gated, tuning.of(x.device).multiprocessors)
    row_tiles, tiles = -(-num_rows // tile.rows), -(-out_features // (64 * tile.wgs))
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    x_map = tensor_map(x, (in_features, num_rows), (1, in_features), (_BOX, tile.rows))
    _kernel(tile, x.dtype, x.device).launch(
        (tiles * row_tiles * splits, 1, 1), tile.threads, tile.shared_bytes,
        pieces, x_map, bias, out, num_rows, out_features, in_features, splits, row_tiles, cluster=splits,
    )  # fmt: skip
    return out


def tiles(groups: int, gated: bool) -> list[Tile]:
    """All that are compiled for."""
    shapes = [
        (rows, wgs, blocks, scaled)
        for rows in (8, 16, 32, 64, 128, 256)
        for wgs in (1, 2, 4)
        for blocks in (1, 2, 3, 4)
        for scaled in (False, True)
        if wgs * blocks <= (2 if rows >= 128 else 4) and (rows < warpgroups.MANY_ROWS or blocks <= 2)
        if not (rows == 256 and (blocks > 1 or not scaled)) and not (rows < 32 and scaled)
    ]
    return [tile_of(*shape, groups, gated) for shape in shapes]


def tile_of(rows: int, wgs: int, blocks: int, scaled: bool, groups: int, gated: bool, spare_bytes: int = 0) -> Tile:
    """With as many stages as there is room for beside `spare_bytes` of each block."""
    stages = warpgroups.stages(_stage_bytes(rows, wgs, groups), blocks, spare_bytes)
    return Tile(rows, wgs, stages, blocks, groups, scaled, gated)


def choose(
    num_rows: int, in_features: int, out_features: int, groups: int, gated: bool, multiprocessors: int
) -> tuple[Tile, int]:  # fmt: skip
    """The quickest instance, and the parts of K."""
    rows = next((rows for rows in (8, 16, 32, 64) if num_rows <= rows), 128)
    wgs, blocks = (1, 4) if rows <= 16 else (2, 2) if rows <= 64 else (2, 1)
    num_tiles = -(-out_features // (64 * wgs)) * -(-num_rows // rows)
    splits = warpgroups.splits(num_tiles, multiprocessors * blocks, -(-in_features // CHUNK))
    return tile_of(rows, wgs, blocks, False, groups, gated), splits


@functools.cache
def compile_ahead(
    in_features: int, out_features: int, groups: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    """Begin to compile what any number of rows may need, once."""
    multiprocessors = tuning.of(device).multiprocessors
    chosen = (choose(rows, in_features, out_features, groups, gated, multiprocessors) for rows in (1, 9, 17, 33, 65))
    program().compile_ahead({tile.name for tile, _ in chosen}, dtype, device)


def products(sizes: Iterable[int]) -> str:
    """The matrix instructions for so many rows of x each."""
    return "\n".join(_products(rows) for rows in sorted(set(sizes)))


def _products(rows: int) -> str:
    """The matrix instruction for `rows` rows of x, whose operands cannot be counted in C++."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    weight = ", ".join(f"%{count + i}" for i in range(4))
    given = ", ".join(f'"r"(weight[{i}])' for i in range(4))
    return f"""
template <> __device__ __forceinline__ void Products<{rows}>::add(float (&sums)[{count}], const u32 (&weight)[4], u64 x,
                                                                  int begun) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0; wgmma.mma_async.sync.aligned.m64n{rows}k16.f32." HALF "." HALF
    " {{{sums}}}, {{{weight}}}, %{count + 4}, p, 1, 1, 0;}}" : {bound} : {given}, "l"(x), "r"(begun));
}}"""


@functools.cache
def program() -> Program:
    """Made with the first weight: no start without such weights is to compile it."""
    known = [tile for groups in GROUPS for gated in (False, True) for tile in tiles(groups, gated)]
    return Program(
        [_HERE.parent / "cuda" / "hopper.cuh", _HERE / "tile_end.cuh", _HERE / "w4.cuh", _HERE / "tiled_w4.cu"],
        {tile.name: tile.source for tile in known},
        prelude=products(tile.rows for tile in known), architecture="sm_90a", listed=False,
    )  # fmt: skip


@functools.cache
def _kernel(tile: Tile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = program().kernel(tile.name, dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
