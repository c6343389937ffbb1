"""Linear layers with some tens of rows on Hopper by tiled.cu: tiles of the weight are streamed through the tensor cores.

few_rows.cu multiplies in registers, and cuBLAS reads a weight only after the previous kernel has ended. This kernel reads before
that and multiplies from shared memory. A token's result does not depend on the number of rows, as long as the same `splits` are
chosen."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program, TensorMap, tensor_map
from ops.gemm import warpgroups

_HERE = Path(__file__).parent
_TILE_ROWS = 128  # rows of the weight per block
DEPTH = 64  # columns per stage
_THREADS = 288
_ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """Instance of tiled.cu: up to `rows` rows of x, `stages` tiles in flight."""

    rows: int
    stages: int
    gated: bool

    @property
    def name(self) -> str:
        return f"tiled_{self.rows}_{self.stages}_{self.gated:d}"

    @property
    def shared_bytes(self) -> int:
        return self.stages * (_TILE_ROWS + self.rows) * DEPTH * 2 + _ALIGNMENT


# Two blocks fit on a multiprocessor, or one with twice as many stages.
STAGES = {32: (5, 10), 64: (4, 8), 128: (3, 6)}
TILES = [Tile(rows, stages, gated) for rows, both in STAGES.items() for stages in both for gated in (False, True)]
MAX_ROWS = max(STAGES)


SOURCES = [
    _HERE.parent / "cuda" / "hopper.cuh",
    *(_HERE / name for name in ("tile_end.cuh", "low_rank.cuh", "tiled.cu")),
]
_PROGRAM = Program(
    SOURCES,
    {tile.name: f"TILED({tile.name}, {tile.rows}, {tile.stages}, {tile.gated:d})" for tile in TILES},
    prelude=warpgroups.products(tile.rows for tile in TILES),
    architecture="sm_90a",
)


def fits(weight: Tensor) -> bool:
    """Return whether weight [N, K] can be cut into tiles."""
    out_features, in_features = weight.shape
    return in_features % 8 == 0 and out_features % 16 == 0 and weight.data_ptr() % 16 == 0


def tiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return x @ weight.T + bias for x [M, K], as [M, N], or [M, N / 2] if `gated`; M at most MAX_ROWS, and the weight `fits`.

    `splits`: number of parts of K, up to 8, and at most K's number of stages of 64."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    x = x.contiguous()
    by = tuning.of(x.device)
    splits = splits or choose_splits(in_features, out_features, by.linear.max_split_blocks)
    num_blocks = -(-out_features // _TILE_ROWS) * splits
    tile = tile or choose(num_rows, num_blocks, gated, by.multiprocessors)
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    _kernel(tile, x.dtype, x.device).launch(
        (num_blocks, 1, 1), _THREADS, tile.shared_bytes,
        pairs_map(weight, DEPTH, _TILE_ROWS, gated=gated), rows_map(x, tile.rows), bias, out,
        num_rows, out_features, in_features, splits, cluster=splits,
    )  # fmt: skip
    return out


def choose(num_rows: int, num_blocks: int, gated: bool, multiprocessors: int) -> Tile:
    """Return the fastest kernel instance. If no second block runs on a multiprocessor, a block uses all of its shared memory."""
    rows = min(rows for rows in STAGES if rows >= num_rows)
    return Tile(rows, STAGES[rows][num_blocks <= multiprocessors], gated)


def choose_splits(in_features: int, out_features: int, max_blocks: int) -> int:
    """Return the number of parts of K. A cluster costs two barriers, so K is split only while that occupies idle
    multiprocessors, with at least four stages each."""
    tiles = -(-out_features // _TILE_ROWS)
    return max(s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= max_blocks and in_features >= 256 * s))


def pairs_map(weight: Tensor, columns: int, rows: int, *, gated: bool) -> TensorMap:
    """Return the tensor map of `rows` by `columns` tiles in pairs of eight rows: [groups, 2, 8, K], rows n and n + 8, or
    gate and up."""
    out_features, in_features = weight.shape
    partner, group = (out_features // 2, 8) if gated else (8, 16)
    sizes = (in_features, 8, 2, out_features // 16)
    strides = (1, in_features, partner * in_features, group * in_features)
    return tensor_map(weight, sizes, strides, (columns, 8, 2, rows // 16))


def rows_map(x: Tensor, rows: int) -> TensorMap:
    return tensor_map(x, (x.shape[1], x.shape[0]), (1, x.shape[1]), (DEPTH, rows))


@functools.cache
def _kernel(tile: Tile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = _PROGRAM.kernel(tile.name, dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
