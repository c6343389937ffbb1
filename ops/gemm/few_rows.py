"""Linear layers with few rows on CUDA by few_rows.cu: the weight is streamed and multiplied in registers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.cuda.program import CompiledKernel, Program

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """Instance of few_rows.cu: `tiles` of 8 rows of x, `batches` of weights in flight in each of `warps`."""

    warps: int
    batches: int
    tiles: int
    gated: bool

    @property
    def name(self) -> str:
        return f"few_rows_{self.warps}_{self.batches}_{self.tiles}_{self.gated:d}"

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of the queues and of two buffers of partial sums."""
        return self.warps * (self.batches * 4096 + 2 * self.tiles * 512)


VARIANTS = [
    Variant(warps, batches, tiles, gated)
    for warps in (8, 16)
    for batches in (1, 2)
    for tiles in (1, 2)
    for gated in (False, True)
]

_PROGRAM = Program(
    [Path(__file__).with_name("few_rows.cu")],
    {v.name: f"FEW_ROWS({v.name}, {v.warps}, {v.batches}, {v.tiles}, {v.gated:d})" for v in VARIANTS},
)


def fits(weight: Tensor) -> bool:
    """Return whether weight [N, K] can be cut into slabs."""
    return weight.shape[1] % 32 == 0 and weight.shape[0] % 16 == 0 and weight.data_ptr() % 16 == 0


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    variant: Variant | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Return the product [M, N], or [M, N / 2] if `gated`, for x [M, K]. M is at most MAX_ROWS, and the weight must satisfy `fits`.
    `ahead`: memory to prefetch into L2 at the end."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    multiprocessors = tuning.of(x.device).multiprocessors
    variant = variant or choose(num_rows, in_features, out_features, gated, multiprocessors)
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    kernel, blocks = _kernel(variant, x.dtype, x.device)
    kernel.launch(
        (min(out_features // 16, blocks * multiprocessors), 1, 1), variant.warps * 32, variant.shared_bytes,
        x.contiguous(), weight, bias, out, num_rows, out_features, in_features, ahead, 0 if ahead is None else ahead.nbytes,
    )  # fmt: skip
    return out


def choose(num_rows: int, in_features: int, out_features: int, gated: bool, multiprocessors: int) -> Variant:
    """Return the fastest kernel instance: with fewer slabs than multiprocessors, more warps share a slab."""
    tiles = 1 if num_rows <= 8 else 2
    warps = 16 if out_features // 16 < multiprocessors else 8
    batches = -(-in_features // (32 * 4 * warps))  # per warp; a longer queue would be wasted
    return Variant(warps, min(2, batches), tiles, gated)


@functools.cache
def _kernel(variant: Variant, dtype: torch.dtype, device: torch.device) -> tuple[CompiledKernel, int]:
    kernel = _PROGRAM.kernel(variant.name, dtype, device)
    kernel.allow_shared_bytes(variant.shared_bytes)
    return kernel, kernel.blocks_per_multiprocessor(variant.warps * 32, variant.shared_bytes)
