"""Linear layers on CUDA: two kernels of our own if reading the weight takes most of the time, otherwise cuBLAS.

Weights stay [N, K] as loaded. In a gated layer, our kernels apply SiLU-mul in the same launch. They start to read a weight before
the previous kernel ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.cuda.program import missing, missing_for_hopper
from ops.gemm import few_rows, reference, tiled, tiled_plus
from ops.gemm.low_rank import LowRank
from ops.gemm.weight import LinearWeight, overwrite
from ops.registry import ShapeClass
from ops.stored import Stored, only_dense

if TYPE_CHECKING:  # not imported on CPUs
    from ops.tuning.numbers import LinearTuning


def supports(case: ShapeClass) -> str | None:
    if case.device != "cuda":
        return f"it runs on CUDA, not on {case.device}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    if case.capability is not None and case.capability < (9, 0):
        return "it requires compute capability 9.0 or more"
    return reference.supports(case) or missing()


class CudaLinearWeight(LinearWeight):
    def __init__(self, stored: Stored) -> None:
        weight, bias = only_dense(stored)
        assert weight is not None
        self._weight, self._bias = weight.contiguous(), bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._few = few_rows.fits(self._weight)
        self._tiled = missing_for_hopper() is None and tiled.fits(self._weight)
        self._tuning = tuning.of(weight.device).linear

    def matmul(self, x: Tensor) -> Tensor:
        own = self._own(x.shape[0], gated=False)
        if own is None:
            as_rows = padded_rows(x.shape[0], self.in_features, self.out_features, self._tuning)
            return padded_product(x, self._weight, self._bias, as_rows)
        return own(x, self._weight, self._bias, gated=False)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        own = self._own(x.shape[0], gated=True)
        return None if own is None else own(x, self._weight, self._bias, gated=True)

    def activated_matmul(self, x: Tensor, activation: str) -> Tensor | None:
        is_known = activation in ("gelu", "gelu_tanh") and x.dtype == torch.bfloat16
        if self._bias is None or not is_known or self._own(x.shape[0], gated=False) is not None:
            return None
        # With tanh, for both variants, of unrounded sums: the error is 1.67e-3, with the exact function 1.66e-3, and 2.46e-3 as a
        # separate kernel. On an H200, 8,192 rows of BERT-base take 70 us, with two kernels
        # 92.
        return torch._addmm_activation(self._bias, x, self._weight.T, use_gelu=True)

    def takes_low_rank(self, num_rows: int, *, gated: bool) -> bool:
        return self._tiled and tiled_plus_wins(num_rows, self._tuning)

    def matmul_plus(self, x: Tensor, low: LowRank, *, gated: bool) -> Tensor:
        return tiled_plus.tiled_plus(x, self._weight, self._bias, low, gated=gated)

    def _own(self, num_rows: int, *, gated: bool) -> Callable[..., Tensor] | None:
        """Return our kernel if it is faster than cuBLAS for this number of rows, or None."""
        if num_rows == 0:
            return None
        if self._few and num_rows <= max_streamed_rows(self.in_features, self.out_features, self._tuning):
            return functools.partial(few_rows.few_rows, ahead=self.next_bytes)
        wins = self._tiled and tiled_wins(num_rows, self.in_features, self.out_features, gated, self._tuning)
        return tiled.tiled if wins else None

    def first_bytes(self) -> Tensor | None:
        return self._weight

    def rows(self, ids: Tensor) -> Tensor:
        from ops.embedding.triton_embedding import embedding  # not imported on CPUs, which lack Triton

        return embedding(ids, self._weight)

    def refill(self, stored: Stored) -> bool:
        weight, bias = only_dense(stored, self._weight.dtype)
        overwrite(self._weight, weight, "weight")
        overwrite(self._bias, bias, "bias")
        return True


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None, as_rows: int) -> Tensor:
    """Return x @ weight.T + bias [M, N] for x [M, K], computed with x padded to `as_rows` rows, M or more."""
    num_rows = x.shape[0]
    if as_rows == num_rows:
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, as_rows - num_rows)), weight, bias)[:num_rows]


def padded_rows(num_rows: int, in_features: int, out_features: int, by: LinearTuning) -> int:
    """Return the number of rows that cuBLAS should compute for `num_rows`."""
    shape = out_features, in_features
    for each in by.padded:
        if (each.out_features, each.in_features) == shape and each.min_rows <= num_rows <= each.max_rows:
            return each.as_rows
    return num_rows


def max_streamed_rows(in_features: int, out_features: int, by: LinearTuning) -> int:
    """Return the largest number of rows for which few_rows.cu is the fastest."""
    return few_rows.MAX_ROWS if out_features * in_features <= by.small_weight else by.max_streamed_rows


def tiled_wins(num_rows: int, in_features: int, out_features: int, gated: bool, by: LinearTuning) -> bool:
    """Return whether tiled.cu beats cuBLAS, for more rows than few_rows.cu takes."""
    small = out_features * in_features <= by.small_weight
    if out_features <= by.narrow_out_features and not gated:
        max_rows = tiled.MAX_ROWS
    elif gated or small or out_features >= by.huge_out_features:
        max_rows = by.max_tiled_rows
    else:
        max_rows = 0
    shallow = small and not gated and in_features < by.shallow_in_features and num_rows <= by.max_shallow_rows
    return num_rows <= max_rows and not shallow


def tiled_plus_wins(num_rows: int, by: LinearTuning) -> bool:
    """Return whether tiled.cu with adapters beats a product followed by adapters."""
    return by.max_streamed_rows < num_rows <= by.max_tiled_rows_plus
