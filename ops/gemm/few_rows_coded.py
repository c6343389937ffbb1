"""Linear layers with few rows on CUDA and a coded weight, by few_rows_coded.cu. Like few_rows.py, it streams the weight, which has
half or a quarter of the bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program
from ops.gemm import pieces
from ops.gemm.warpgroups import SHARED_BYTES
from ops.stored import FP8, W4, W8, WeightFormat

MAX_ROWS = 16
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class _Codes:
    """Layout of codes in few_rows_coded.cu: `columns` of a unit, `units` of a batch."""

    name: str
    columns: int
    units: int


_CODES = {FP8: _Codes("Fp8", 64, 4), W8: _Codes("W8", 64, 4), W4: _Codes("W4", 128, 2)}
_MANY_SLABS, _SOME_SLABS, _DEEP = 1024, 264, 8192
_SEGMENTS = {FP8: (0, 1), W8: (0, 1), W4: pieces.GROUPS}


@dataclass(frozen=True, slots=True)
class CodedVariant:
    """Instance of few_rows_coded.cu: few_rows.Variant for codes with `segments` scales per unit, 0 for one per row."""

    codes: WeightFormat
    segments: int
    warps: int
    batches: int
    tiles: int
    gated: bool

    @property
    def name(self) -> str:
        words = self.codes, self.segments, self.warps, self.batches, self.tiles, int(self.gated)
        return "_".join(map(str, ("few", *words)))

    @property
    def source(self) -> str:
        words = self.name, _CODES[self.codes].name, self.segments, self.warps, self.batches, self.tiles, int(self.gated)
        return f"FEW_CODED({', '.join(map(str, words))})"

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of the queues of codes and scales, and of two buffers of partial sums."""
        slots = self.batches * _CODES[self.codes].units
        return self.warps * (slots * (1024 + 256 * self.segments) + 2 * self.tiles * 512)


def variants(codes: WeightFormat) -> list[CodedVariant]:
    """Return all variants whose shared memory fits into a block."""
    found = (
        CodedVariant(codes, segments, warps, queued, tiles, gated)
        for segments in _SEGMENTS[codes]
        for warps in (8, 16)
        for queued in (1, 2)
        for tiles in (1, 2)
        for gated in (False, True)
    )
    return [each for each in found if each.shared_bytes <= SHARED_BYTES]


def segments_of(codes: WeightFormat, in_features: int, groups: int) -> tuple[int, int] | None:
    """Return the segments (scales) of a unit, and the right shift that maps a segment's index to its group's for 8-bit
    codes. None if no instance supports them."""
    if codes not in _CODES or in_features % _CODES[codes].columns or in_features % groups:
        return None
    if codes == W4:
        segments = pieces.groups_of_chunk(W4, in_features, groups)
        return None if segments is None else (segments, 0)
    if groups == 1:
        return 0, 31
    per_group, rest = divmod(in_features // groups, _CODES[codes].columns)
    if not rest and per_group & (per_group - 1) == 0 and per_group:
        return 1, per_group.bit_length() - 1
    return None


def fits(codes: WeightFormat, out_features: int, in_features: int, groups: int) -> bool:
    return out_features % 16 == 0 and segments_of(codes, in_features, groups) is not None


def few_rows(
    x: Tensor, codes: WeightFormat, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, groups: int, *,
    gated: bool, variant: CodedVariant | None = None, max_blocks: int | None = None, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the product [M, N], or [M, N / 2] if `gated`, for x [M, K], computed MAX_ROWS rows at a time. weight [N, bytes of K
    codes] and scales [groups, N] float32 are stored as in coded.py. Or `weight` is in the layout of pieces.py, which includes
    scales; see `fits`. `max_blocks`: number of blocks per multiprocessor, by default as many as fit. `ahead`: memory to prefetch
    into L2 at the end."""
    num_rows, in_features = x.shape
    found = segments_of(codes, in_features, groups)
    assert found is not None
    segments, shift = found
    x = x.contiguous()
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    for first in range(0, num_rows, MAX_ROWS):
        count = min(MAX_ROWS, num_rows - first)
        kept = variant or choose(codes, segments, count, in_features, out_features, gated)
        kernel, blocks = _kernel(kept, x.dtype, x.device)
        places = min(blocks, max_blocks or blocks) * tuning.of(x.device).multiprocessors
        kernel.launch(
            (min(out_features // 16, places), 1, 1), kept.warps * 32, kept.shared_bytes,
            x[first:], weight, scales, bias, out[first:], count, out_features, in_features, shift,
            ahead, 0 if ahead is None else ahead.nbytes,
        )  # fmt: skip
    return out


def choose(
    codes: WeightFormat, segments: int, num_rows: int, in_features: int, out_features: int, gated: bool
) -> CodedVariant:  # fmt: skip
    """Return the fastest kernel variant, measured by `benches.ops.coded streams` on an H200.

    A block has all warps that a slab allows, and a longer queue if there are many slabs, so that one sum is written while
    the next slab is read. 4-bit codes use smaller blocks if two large ones per multiprocessor would need a second wave (6144
    x 4096: 6.9 us instead of 7.5)."""
    tiles, slabs = 1 if num_rows <= 8 else 2, out_features // 16
    warps, queued = 16, 1
    if slabs >= _MANY_SLABS and tiles == 1:
        warps, queued = (8 if codes == W4 else 16), 2
    elif tiles == 1:
        warps = 8 if codes == W4 and slabs > _SOME_SLABS and in_features < _DEEP else 16
    elif segments and (in_features > _DEEP) == (codes == W4):
        warps = 8
    return CodedVariant(codes, segments, warps, queued, tiles, gated)


@functools.cache
def compile_ahead(
    codes: WeightFormat, in_features: int, out_features: int, groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Start compiling the kernel instances that such a weight may need, once."""
    if (found := segments_of(codes, in_features, groups)) is None:
        return
    shapes = [(num_rows, gated) for num_rows in (1, MAX_ROWS) for gated in (False, True)]
    wanted = {choose(codes, found[0], num_rows, in_features, out_features, gated).name for num_rows, gated in shapes}
    program(codes).compile_ahead(wanted, dtype, device)


@functools.cache
def program(codes: WeightFormat) -> Program:
    """Return the program. It is created with the first coded weight, so that other starts do not compile it."""
    sources = [_HERE / "few_rows.cu", _HERE / "codes.cuh", _HERE / "few_rows_coded.cu"]
    return Program(sources, {each.name: each.source for each in variants(codes)}, listed=False)


@functools.cache
def _kernel(variant: CodedVariant, dtype: torch.dtype, device: torch.device) -> tuple[CompiledKernel, int]:
    kernel = program(variant.codes).kernel(variant.name, dtype, device)
    kernel.allow_shared_bytes(variant.shared_bytes)
    return kernel, kernel.blocks_per_multiprocessor(variant.warps * 32, variant.shared_bytes)
