"""Linear layers on CUDA: our own stream of the weight (few_rows.cu) where its bytes are what takes the time, cuBLAS elsewhere.

Weights stay as they came, [N, K]. With few rows the SiLU-mul behind a gated layer is part of the same kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ops.cuda.program import Kernel, Program, missing
from ops.gemm.weight import LinearWeight
from ops.registry import ShapeClass

# Measured on an H200 over the layers of the 0.6B and 8B shapes, in a graph, own kernel against cuBLAS (tests/ops/bench_cuda.py).
_ALWAYS_ROWS = 8  # up to here the stream wins at every size
MOST_ROWS = 32  # and up to here for matrices of at most
_SMALL = 1 << 24  # elements
_FEW_SLABS = 132  # a multiprocessor each: below this, more warps share a slab


def supports(case: ShapeClass) -> str | None:
    if case.device != "cuda":
        return f"it runs on CUDA, not on {case.device}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    return missing()


@dataclass(frozen=True, slots=True)
class Variant:
    """One instance of few_rows.cu: `tiles` of 8 rows of x, `batches` of weights under way in each of `warps`."""

    warps: int
    batches: int
    tiles: int
    gated: bool

    @property
    def name(self) -> str:
        return f"few_rows_{self.warps}_{self.batches}_{self.tiles}_{self.gated:d}"

    @property
    def shared_bytes(self) -> int:
        """The queues, and two buffers of partial sums."""
        return self.warps * (self.batches * 4096 + 2 * self.tiles * 512)


VARIANTS = [
    Variant(warps, batches, tiles, gated)
    for warps in (8, 16)
    for batches in (1, 2)
    for tiles in (1, 2, 4)
    for gated in (False, True)
]

_PROGRAM = Program(
    [Path(__file__).with_name("few_rows.cu")],
    "\n".join(f"FEW_ROWS({v.name}, {v.warps}, {v.batches}, {v.tiles}, {v.gated:d})" for v in VARIANTS),
)


class CudaLinearWeight(LinearWeight):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        fits = self.in_features % 32 == 0 and self.out_features % 16 == 0 and self._weight.data_ptr() % 16 == 0
        self._most_rows = 0 if not fits else MOST_ROWS if weight.numel() <= _SMALL else _ALWAYS_ROWS

    def matmul(self, x: Tensor) -> Tensor:
        if 0 < x.shape[0] <= self._most_rows:
            return few_rows(x, self._weight, self._bias, gated=False)
        return functional.linear(x, self._weight, self._bias)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        return few_rows(x, self._weight, self._bias, gated=True) if 0 < x.shape[0] <= self._most_rows else None

    def rows(self, ids: Tensor) -> Tensor:
        from ops.embedding.triton_embedding import embedding  # no CPU needs Triton

        return embedding(ids, self._weight)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool, variant: Variant | None = None) -> Tensor:
    """x [M, K] -> [M, N], or [M, N / 2] if `gated`; M at most 32, K a multiple of 32, N of 16."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    variant = variant or choose(num_rows, in_features, out_features, gated)
    out = x.new_empty(num_rows, out_features // 2 if gated else out_features)
    kernel, resident = _kernel(variant, x.dtype, x.device)
    kernel.launch(
        (min(out_features // 16, resident), 1, 1), variant.warps * 32, variant.shared_bytes,
        x.contiguous(), weight, bias, out, num_rows, out_features, in_features,
    )  # fmt: skip
    return out


def choose(num_rows: int, in_features: int, out_features: int, gated: bool) -> Variant:
    tiles = 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4
    warps = 16 if out_features // 16 < _FEW_SLABS else 8
    batches = -(-in_features // (32 * 4 * warps))  # in a warp's share of K; more queue than that is wasted
    return Variant(warps, min(2, batches), tiles, gated)


@functools.cache
def _kernel(variant: Variant, dtype: torch.dtype, device: torch.device) -> tuple[Kernel, int]:
    """The kernel, and how many blocks of it are resident at once."""
    kernel = _PROGRAM.kernel(variant.name, dtype, device)
    kernel.allow_shared_bytes(variant.shared_bytes)
    blocks = kernel.blocks_per_multiprocessor(variant.warps * 32, variant.shared_bytes)
    return kernel, blocks * torch.cuda.get_device_properties(device).multi_processor_count
