"""Linear layers with some tens of rows that add each row's LoRA adapter in the same kernel (tiled.cu, low_rank.cuh)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program
from ops.gemm import tiled, warpgroups
from ops.gemm.low_rank import COLUMNS, LowRank

MAX_ROWS = 64
RANKS = (16, 32)  # ranks with compiled kernels
_THREADS = 320
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class AdapterTile:
    """Instance of tiled.cu for adapters of rank `rank`."""

    base: tiled.Tile
    rank: int

    @property
    def name(self) -> str:
        return f"{self.base.name}_plus_{self.rank}"

    @property
    def source(self) -> str:
        return f"TILED_PLUS({self.name}, {self.base.rows}, {self.base.stages}, {self.base.gated:d}, {self.rank})"


_TILES = [AdapterTile(base, rank) for base in tiled.TILES if base.rows <= MAX_ROWS for rank in RANKS]
_PROGRAM = Program(
    tiled.SOURCES,
    {tile.name: tile.source for tile in _TILES},
    prelude=warpgroups.products(tile.base.rows for tile in _TILES),
    architecture="sm_90a",
    listed=False,
)


def fits(parts: tuple[int, ...], rank: int, *, gated: bool) -> bool:
    """Return whether each block's columns belong to one part of the output, or to two of equal size."""
    if rank not in RANKS:
        return False
    return (
        len(parts) == 2 and parts[0] == parts[1] and parts[0] % (COLUMNS // 2) == 0
        if gated
        else all(part % COLUMNS == 0 for part in parts)
    )


@functools.cache
def compile_ahead(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Start compiling the kernel instances for adapters of this rank."""
    by = tuning.of(device).linear
    if rank in RANKS and by.max_tiled_rows_plus > by.max_streamed_rows and _PROGRAM.runs_on(device):
        _PROGRAM.compile_ahead([tile.name for tile in _TILES if tile.rank == rank], dtype, device)


def tiled_plus(
    x: Tensor, weight: Tensor, bias: Tensor | None, low: LowRank, *, gated: bool, splits: int | None = None,
    stages: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `tiled.tiled` of x [M, K], M at most MAX_ROWS, with `low` added before it is rounded or gated; see `fits`."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    x = x.contiguous()
    by = tuning.of(x.device)
    splits = splits or tiled.choose_splits(in_features, out_features, by.linear.max_split_blocks)
    num_blocks = out_features // COLUMNS * splits
    base = tiled.choose(num_rows, num_blocks, gated, by.multiprocessors)
    if stages is not None:
        base = tiled.Tile(base.rows, stages, gated)
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    pieces, _, num_parts, rank = low.h.shape
    _kernel(AdapterTile(base, rank), x.dtype, x.device).launch(
        (num_blocks, 1, 1), _THREADS, base.shared_bytes,
        tiled.pairs_map(weight, tiled.DEPTH, COLUMNS, gated=gated), tiled.rows_map(x, base.rows), bias, out,
        num_rows, out_features, in_features, splits,
        low.h, low.b, low.scale, low.order, low.slots, low.tiles, low.used, low.parts,
        low.b.stride(0) * low.b.itemsize // 16, low.scale.stride(0), num_parts * rank, pieces, cluster=splits,
    )  # fmt: skip
    return out


@functools.cache
def _kernel(tile: AdapterTile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = _PROGRAM.kernel(tile.name, dtype, device)
    kernel.allow_shared_bytes(tile.base.shared_bytes)
    return kernel
