"""Grouped products of coded experts on Hopper, with weights in registers (experts_coded.cu). Weights are in the pieces of
gemm/pieces.py, one expert after another."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program, tensor_map
from ops.gemm import pieces as lie
from ops.gemm import warpgroups
from ops.gemm.pieces import PiecesTile
from ops.moe.triton_route import Routed, gather
from ops.moe.weights import ExpertShape, Half
from ops.stored import E2M1, FP4, FP8, NF4, Q4, Q8, W4, W8, WeightFormat

_GEMM = Path(lie.__file__).parent
_KERNEL, _CLAMPED = "experts_coded", "experts_clamped"
_BOX = 64  # columns of x per copy
_MAX_EXPERTS = 512


_DECODED = (E2M1, NF4, FP4, Q4, Q8)
_CLAMPS = frozenset(_DECODED)  # codes that are also tested with clamped gates


def fits(codes: WeightFormat, shape: ExpertShape, groups: int, half: Half) -> bool:
    """Return whether this kernel computes a half of such experts: gated by silu or as GPT-OSS, in whole pieces."""
    out_features, in_features = shape.matrix(half)
    whole = shape.hidden_size % 64 == 0 and shape.intermediate_size % lie.PIECE_ROWS == 0
    gated = shape.gated and _is_known(codes, shape) and shape.num_experts <= _MAX_EXPERTS
    return whole and gated and lie.fits(codes, out_features, in_features, groups)


def _is_known(codes: WeightFormat, shape: ExpertShape) -> bool:
    return shape.activation == "silu" if isinstance(shape.activation, str) else codes in _CLAMPS


def experts_coded(
    codes: WeightFormat, shape: ExpertShape, half: Half, pieces: Tensor, bias: Tensor | None, x: Tensor, routed: Routed,
    tile: PiecesTile | None = None,
) -> Tensor:  # fmt: skip
    """Return one half of the experts for all pairs of token and expert. gate_up: x [T, H] yields activated [pairs, I] in sorted
    order. down: x [pairs, I] in sorted order yields weighted [pairs, H] in the order of pairs. pieces [E, ...]: from
    `pieces.in_pieces`."""
    first, num_pairs = half == "gate_up", routed.order.shape[0]
    out_features, in_features = shape.matrix(half)
    x = gather(x, routed.order, routed.chosen.weights.shape[1]) if first else x.contiguous()
    if tile is None:
        tile = choose(codes, num_pairs / shape.num_experts, lie.groups_of(codes, pieces), gated=first)
    multiprocessors = tuning.of(x.device).multiprocessors
    max_tiles = -(-num_pairs // tile.rows) + min(num_pairs, shape.num_experts)
    num_blocks = min(multiprocessors * tile.blocks, max_tiles * -(-out_features // (64 * tile.wgs)))
    out = x.new_empty(num_pairs, shape.intermediate_size if first else shape.hidden_size)
    kind = shape.activation
    limits = () if isinstance(kind, str) or not first else (kind.alpha, kind.limit)
    _kernel(tile, _CLAMPED if limits else _KERNEL, x.dtype, x.device).launch(
        (num_blocks, 1, 1), tile.threads, tile.shared_bytes,
        pieces, tensor_map(x, (in_features, num_pairs), (1, in_features), (_BOX, tile.rows)), bias, routed.order, routed.starts,
        routed.chosen.weights, out, shape.num_experts, out_features, in_features, *limits,
    )  # fmt: skip
    return out


def choose(codes: WeightFormat, pairs_per_expert: float, groups: int, *, gated: bool) -> PiecesTile:
    """Return the fastest kernel instance for this mean number of pairs (of token and expert) per expert. Most experts then need one
    tile."""
    most = next((rows for rows in _SHAPES if pairs_per_expert * 1.5 <= rows), max(_SHAPES))
    wgs, blocks = _SHAPES[most]
    return lie.tile_of(codes, most, wgs, blocks, groups == lie.FINEST, groups, gated, spare_bytes=_MAX_EXPERTS * 4)


_SHAPES = {
    8: (2, 2),
    16: (2, 2),
    32: (2, 2),
    64: (2, 1),
    128: (2, 1),
}  # by rows of x: warpgroups, and blocks per multiprocessor


def tiles(codes: WeightFormat, groups: int, *, gated: bool) -> list[PiecesTile]:
    """Return all kernel instances that `choose` can return."""
    return [choose(codes, rows / 1.5, groups, gated=gated) for rows in _SHAPES]


@functools.cache
def compile_ahead(
    codes: WeightFormat, groups: int, dtype: torch.dtype, device: torch.device, *, clamped: bool = False
) -> None:
    """Start compiling the kernel instances for any number of pairs, once."""
    kernels = {False: _KERNEL, True: _CLAMPED if clamped else _KERNEL}  # by whether there are gates
    names = [tile.name(kernels[gated]) for gated in (False, True) for tile in tiles(codes, groups, gated=gated)]
    program().compile_ahead(names, dtype, device)


@functools.cache
def program() -> Program:
    """Return the program. It is created with the first coded expert, so that other starts do not compile it."""
    written = [(codes, groups) for codes in (FP8, W4, W8, *_DECODED) for groups in lie.group_counts(codes)]
    known = [tile for each in written for gated in (False, True) for tile in tiles(*each, gated=gated)]
    products = warpgroups.products((tile.rows for tile in known), out_of_registers=True)
    sources = [_GEMM.parent / "cuda" / "hopper.cuh", _GEMM / "tile_end.cuh", *lie.SOURCES]
    return Program(
        [*sources, Path(__file__).with_suffix(".cu")],
        {tile.name(kind): tile.source(kind) for tile in known for kind in (_KERNEL, _CLAMPED)[: 1 + tile.gated]},
        prelude=f"{lie.tables()}\n{products}", architecture="sm_90a", listed=False,
    )  # fmt: skip


@functools.cache
def _kernel(tile: PiecesTile, kind: str, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = program().kernel(tile.name(kind), dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
