"""Linear layers on Hopper whose weight and x are E4M3 codes, by tiled_fp8.cu: tiles of both are in shared memory. Supports any
number of rows.

There is a scale per row, or per 128 columns of a row. The activation of a gated layer is part of the same launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program, tensor_map
from ops.gemm import warpgroups
from ops.gemm.tiled import pairs_map

_HERE = Path(__file__).parent
GROUP = 128  # columns that share scales
SLACK = 256  # readable scales after the last


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """Instance of tiled_fp8.cu: `rows` of x by 64 * `wgs` rows of the weight, `stages` chunks in flight, `blocks` per
    multiprocessor; `grouped`: with scales per chunk."""

    rows: int
    wgs: int
    stages: int
    blocks: int
    grouped: bool
    gated: bool

    @property
    def name(self) -> str:
        sizes = self.rows, self.wgs, self.stages, self.blocks, int(self.grouped), int(self.gated)
        return "_".join(map(str, ("tiled_fp8", *sizes)))

    @property
    def source(self) -> str:
        sizes = self.rows, self.wgs, self.stages, int(self.grouped), int(self.gated)
        registers = warpgroups.registers(self.rows, self.wgs, self.blocks)
        words = self.name, *sizes, self.blocks, self.threads, registers
        return f"TILED_FP8({', '.join(map(str, words))})"

    @property
    def threads(self) -> int:
        return warpgroups.threads(self.rows, self.wgs)

    @property
    def shared_bytes(self) -> int:
        return self.stages * _stage_bytes(self.rows, self.wgs, self.grouped) + warpgroups.ALIGNMENT


def _stage_bytes(rows: int, wgs: int, grouped: bool) -> int:
    return (rows + 64 * wgs) * (GROUP + (4 if grouped else 0))


def fits(out_features: int, in_features: int, groups: int) -> bool:
    scaled = groups == 1 or groups * GROUP == in_features
    return scaled and out_features % 16 == 0 and in_features % 16 == 0


def with_slack(scales: Tensor) -> Tensor:
    """Return a copy of scales [groups, N] with readable memory after its end."""
    room = scales.new_zeros(scales.numel() + SLACK)
    return room[: scales.numel()].view(scales.shape).copy_(scales)


def tiled_fp8(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, gated: bool,
    tile: Fp8Tile | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the product [M, N], or [M, N / 2] if `gated`, of x [M, K] uint8 with x_scales [groups, M] and weight [N, K] uint8 with
    scales [groups, N]; see `fits`. SLACK readable numbers follow both scales, and rows of x_scales begin at multiples of 4.

    `splits`: number of parts of K, at most 8 and at most K's number of chunks."""
    (num_rows, in_features), (groups, out_features) = x.shape, scales.shape
    if tile is None or splits is None:
        compile_ahead(in_features, out_features, groups > 1, gated, out_dtype, x.device)
        multiprocessors = tuning.of(x.device).multiprocessors
        tile, splits = choose(num_rows, in_features, out_features, groups > 1, gated, multiprocessors)
    row_tiles, tiles_of_weight = -(-num_rows // tile.rows), -(-out_features // (64 * tile.wgs))
    out = torch.empty((num_rows, out_features // 2 if gated else out_features), dtype=out_dtype, device=x.device)
    x_map = tensor_map(x, (in_features, num_rows), (1, in_features), (GROUP, tile.rows))
    _kernel(tile, out_dtype, x.device).launch(
        (tiles_of_weight * row_tiles * splits, 1, 1), tile.threads, tile.shared_bytes,
        pairs_map(weight, GROUP, 64 * tile.wgs, gated=gated), scales, x_map, x_scales, x_scales.stride(0), bias, out,
        num_rows, out_features, in_features, splits, row_tiles, cluster=splits,
    )  # fmt: skip
    return out


def tiles(grouped: bool, gated: bool) -> list[Fp8Tile]:
    """Return all kernel instances that the program contains."""
    shapes = [(32, 2, 2), (32, 1, 4), (64, 2, 1), (64, 2, 2), (64, 4, 1), (128, 2, 1)]
    if not grouped:
        shapes += [(128, 1, 2), (256, 2, 1)]
    return [_tile(*shape, grouped, gated) for shape in shapes]


def _tile(rows: int, wgs: int, blocks: int, grouped: bool, gated: bool) -> Fp8Tile:
    stages = warpgroups.stages(_stage_bytes(rows, wgs, grouped), blocks)
    return Fp8Tile(rows, wgs, stages, blocks, grouped, gated)


def choose(
    num_rows: int, in_features: int, out_features: int, grouped: bool, gated: bool, multiprocessors: int
) -> tuple[Fp8Tile, int]:  # fmt: skip
    """Return the fastest kernel instance, and the number of parts of K."""
    of_weight = -(-out_features // 128)
    rows = 32 if num_rows <= 32 else 64 if grouped or -(-num_rows // 64) * of_weight <= multiprocessors else 128
    wgs, blocks = (2, 2) if rows == 32 or grouped else (2, 1)
    num_tiles = -(-out_features // (64 * wgs)) * -(-num_rows // rows)
    splits = warpgroups.splits(num_tiles, multiprocessors * blocks, -(-in_features // GROUP))
    return _tile(rows, wgs, blocks, grouped, gated), splits


@functools.cache
def compile_ahead(
    in_features: int, out_features: int, grouped: bool, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    """Start compiling the kernel instances for any number of rows, once."""
    multiprocessors = tuning.of(device).multiprocessors
    chosen = (choose(rows, in_features, out_features, grouped, gated, multiprocessors) for rows in (17, 33, 65))
    program().compile_ahead({tile.name for tile, _ in chosen}, dtype, device)


@functools.cache
def program() -> Program:
    """Return the program. It is created with the first fp8 weight, so that other starts do not compile it."""
    known = [tile for grouped in (False, True) for gated in (False, True) for tile in tiles(grouped, gated)]
    return Program(
        [_HERE.parent / "cuda" / "hopper.cuh", _HERE / "tile_end.cuh", _HERE / "tiled_fp8.cu"],
        {tile.name: tile.source for tile in known},
        prelude=warpgroups.products((tile.rows for tile in known), of_codes=True),
        architecture="sm_90a", listed=False,
    )  # fmt: skip


@functools.cache
def _kernel(tile: Fp8Tile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = program().kernel(tile.name, dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
