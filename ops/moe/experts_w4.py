"""Grouped products of experts in four bits on Hopper, out of registers (experts_w4.cu): weights lie in the pieces of
gemm/tiled_w4.py, expert behind expert."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program
from ops.cuda.tensor_map import tensor_map
from ops.gemm import tiled_w4
from ops.gemm.tiled_w4 import Tile
from ops.moe.triton_gather import gather
from ops.moe.triton_route import Routed
from ops.moe.weights import ExpertShape, Half

_GEMM = Path(tiled_w4.__file__).parent
_BOX = 64  # columns of x in one copy
_MAX_EXPERTS = 512


def fits(shape: ExpertShape, groups: int, half: Half) -> bool:
    """Whether a half of such experts, with so many groups of columns, is computed here: gated by silu, in whole pieces."""
    out_features, in_features = shape.matrix(half)
    whole = shape.hidden_size % 64 == 0 and shape.intermediate_size % tiled_w4.PIECE_ROWS == 0
    gated = shape.gated and shape.activation == "silu" and shape.num_experts <= _MAX_EXPERTS
    return whole and gated and tiled_w4.fits(out_features, in_features, groups)


def experts_w4(
    shape: ExpertShape, half: Half, pieces: Tensor, bias: Tensor | None, x: Tensor, routed: Routed, tile: Tile | None = None
) -> Tensor:  # fmt: skip
    """gate_up: x [T, H] -> [pairs, I] by place, activated; down: x [pairs, I] by place -> [pairs, H] by pair, weighted. pieces
    [E, ...]: as of `tiled_w4.in_pieces`."""
    first, num_pairs = half == "gate_up", routed.order.shape[0]
    out_features, in_features = shape.matrix(half)
    x = gather(x, routed.order, routed.chosen.weights.shape[1]) if first else x.contiguous()
    if tile is None:
        tile = choose(num_pairs / shape.num_experts, tiled_w4.groups_of(pieces), gated=first)
    multiprocessors = tuning.of(x.device).multiprocessors
    max_tiles = -(-num_pairs // tile.rows) + min(num_pairs, shape.num_experts)
    num_blocks = min(multiprocessors * tile.blocks, max_tiles * -(-out_features // (64 * tile.wgs)))
    out = x.new_empty(num_pairs, shape.intermediate_size if first else shape.hidden_size)
    _kernel(tile, x.dtype, x.device).launch(
        (num_blocks, 1, 1), tile.threads, tile.shared_bytes,
        pieces, tensor_map(x, (in_features, num_pairs), (1, in_features), (_BOX, tile.rows)), bias, routed.order, routed.starts,
        routed.chosen.weights, out, shape.num_experts, out_features, in_features,
    )  # fmt: skip
    return out


def choose(pairs_per_expert: float, groups: int, *, gated: bool) -> Tile:
    """The quickest instance for so many pairs on average: most experts' are one tile."""
    most = next((rows for rows in _SHAPES if pairs_per_expert * 1.5 <= rows), max(_SHAPES))
    wgs, blocks = _SHAPES[most]
    return tiled_w4.tile_of(most, wgs, blocks, False, groups, gated, spare_bytes=_MAX_EXPERTS * 4)


_SHAPES = {
    8: (2, 2),
    16: (2, 2),
    32: (2, 2),
    64: (2, 1),
    128: (2, 1),
}  # rows of x: warpgroups, and blocks of a multiprocessor


def tiles(groups: int, *, gated: bool) -> list[Tile]:
    """All that `choose` may say."""
    return [choose(rows / 1.5, groups, gated=gated) for rows in _SHAPES]


@functools.cache
def compile_ahead(groups: int, dtype: torch.dtype, device: torch.device) -> None:
    """Begin to compile what any number of pairs may need, once."""
    names = [_name(tile) for gated in (False, True) for tile in tiles(groups, gated=gated)]
    program().compile_ahead(names, dtype, device)


def _name(tile: Tile) -> str:
    return tile.name.replace("tiled", "experts")


@functools.cache
def program() -> Program:
    """Made with the first weight: no start without such weights is to compile it."""
    known = [tile for groups in tiled_w4.GROUPS for gated in (False, True) for tile in tiles(groups, gated=gated)]
    parts = [
        _GEMM.parent / "cuda" / "hopper.cuh",
        _GEMM / "tile_end.cuh",
        _GEMM / "w4.cuh",
        Path(__file__).with_suffix(".cu"),
    ]
    instances = {_name(tile): tile.source.replace("TILED", "EXPERTS").replace("tiled", "experts") for tile in known}
    return Program(
        parts, instances, prelude=tiled_w4.products(tile.rows for tile in known), architecture="sm_90a", listed=False
    )


@functools.cache
def _kernel(tile: Tile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = program().kernel(_name(tile), dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
