"""Linear layers on Hopper by tiled_w4.cu, with a weight in the layout of pieces.py, mostly 4-bit, for any number of rows. Codes are
streamed to the tensor cores, which read them from registers."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program, tensor_map
from ops.gemm import warpgroups
from ops.gemm.pieces import CHUNK, FINEST, SOURCES, PiecesTile, group_counts, groups_of, tables, tile_of
from ops.stored import FOUR_BITS, W4, WeightFormat

_HERE = Path(__file__).parent
_KERNEL = "tiled_w4"
_BOX = 64  # columns of x per copy
_DEEP = 8192  # number of columns above which the tiles' reads of x cost more than a larger number of tiles


def tiled_w4(
    x: Tensor, pieces: Tensor, out_features: int, bias: Tensor | None, *, gated: bool,
    tile: PiecesTile | None = None, splits: int | None = None, codes: WeightFormat = W4, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the product [M, N], or [M, N / 2] if `gated`, for x [M, K]. pieces: result of `in_pieces` for `codes`.

    `splits`: number of parts of K, at most 8 and at most K's number of chunks. `ahead`: memory to prefetch into L2 at the end."""
    num_rows, in_features = x.shape
    x = x.contiguous()
    groups = groups_of(codes, pieces)
    if tile is None or splits is None:
        compile_ahead(codes, in_features, out_features, groups, gated, x.dtype, x.device)
        by = tuning.of(x.device)
        tile, splits = choose(num_rows, in_features, out_features, groups, gated, by.multiprocessors, x.dtype, codes)
    row_tiles, tiles = -(-num_rows // tile.rows), -(-out_features // (64 * tile.wgs))
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    x_map = tensor_map(x, (in_features, num_rows), (1, in_features), (_BOX, tile.rows))
    _kernel(tile, x.dtype, x.device).launch(
        (tiles * row_tiles * splits, 1, 1), tile.threads, tile.shared_bytes,
        pieces, x_map, bias, out, num_rows, out_features, in_features, splits, row_tiles,
        ahead, 0 if ahead is None else ahead.nbytes, cluster=splits,
    )  # fmt: skip
    return out


def tiles(groups: int, gated: bool, codes: WeightFormat = W4) -> list[PiecesTile]:
    """Return all kernel instances that the program contains."""
    shapes = [
        (rows, wgs, blocks, scaled)
        for rows in (8, 16, 32, 64, 128, 256)
        for wgs in (1, 2, 4)
        for blocks in (1, 2, 3, 4)
        for scaled in ((True,) if groups == FINEST else (False, True))
        if wgs * blocks <= (2 if rows >= 128 and not (rows == 128 and scaled and wgs == 4) else 4)
        if rows < warpgroups.MANY_ROWS or blocks <= 2
        if not (rows == 256 and (blocks > 1 or not scaled)) and not (rows < 32 and scaled and groups != FINEST)
    ]
    return [tile_of(codes, *shape, groups, gated) for shape in shapes]


def choose(
    num_rows: int, in_features: int, out_features: int, groups: int, gated: bool, multiprocessors: int,
    dtype: torch.dtype = torch.bfloat16, codes: WeightFormat = W4,
) -> tuple[PiecesTile, int]:  # fmt: skip
    """Return the fastest kernel instance, by `benches.ops.coded tiles` on an H200, and the number of parts of K. With many rows,
    scales multiply bfloat16 numbers; float16 might not represent the results."""
    rows = next((rows for rows in (8, 16, 32, 64) if num_rows <= rows), 128)
    of_weight, scaled = -(-out_features // 64), (rows == 128 and dtype == torch.bfloat16) or groups == FINEST
    if rows < 128:
        many = 4 * of_weight > 0.9 * 3 * multiprocessors  # clusters of four cannot use every place
        wgs, blocks = 1, 2 if rows > 32 else 4 if many else 3
    else:  # one block per multiprocessor, as small as possible with all tiles running at once
        if scaled and num_rows > rows and (of_weight * -(-num_rows // rows) > multiprocessors or in_features > _DEEP):
            rows = 256
        row_tiles, most = -(-num_rows // rows), 4 if scaled and rows == 128 else 2
        wgs = next(wgs for wgs in (1, 2, 4) if -(-of_weight // wgs) * row_tiles <= multiprocessors or wgs == most)
        if (
            rows == 256
            and wgs == most
            and codes not in FOUR_BITS
            and -(-of_weight // wgs) * row_tiles > multiprocessors
        ):
            rows, wgs = 128, 4  # with 256 rows, shared memory has only two stages for bytes
        blocks = 1
    num_tiles = -(-out_features // (64 * wgs)) * -(-num_rows // rows)
    splits = warpgroups.splits(num_tiles, multiprocessors * blocks, -(-in_features // CHUNK))
    return tile_of(codes, rows, wgs, blocks, scaled, groups, gated), splits


@functools.cache
def compile_ahead(
    codes: WeightFormat, in_features: int, out_features: int, groups: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    """Start compiling the kernel instances for any number of rows, once."""
    multiprocessors = tuning.of(device).multiprocessors
    chosen = (
        choose(rows, in_features, out_features, groups, gated, multiprocessors, dtype, codes)
        for rows in (1, 9, 17, 33, 65, 129, 257, 513)
    )
    program(codes).compile_ahead({tile.name(_KERNEL) for tile, _ in chosen}, dtype, device)


@functools.cache
def program(codes: WeightFormat = W4) -> Program:
    """Return the program. It is created with the first such weight, so that other starts do not compile it."""
    known = [tile for groups in group_counts(codes) for gated in (False, True) for tile in tiles(groups, gated, codes)]
    products = warpgroups.products((tile.rows for tile in known), out_of_registers=True)
    return Program(
        [_HERE.parent / "cuda" / "hopper.cuh", _HERE / "tile_end.cuh", *SOURCES, _HERE / "tiled_w4.cu"],
        {tile.name(_KERNEL): tile.source(_KERNEL) for tile in known},
        prelude=f"{tables()}\n{products}", architecture="sm_90a", listed=False,
    )  # fmt: skip


@functools.cache
def _kernel(tile: PiecesTile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = program(tile.codes).kernel(tile.name(_KERNEL), dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
