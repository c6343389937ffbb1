"""Linear layers on CUDA: two kernels of our own where the weight's bytes are what takes the time, cuBLAS elsewhere.

Weights stay as they came, [N, K]. In our own kernels the SiLU-mul behind a gated layer is part of the same launch, and a weight
is read before its predecessor has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ops.cuda.program import missing
from ops.gemm import few_rows, reference, tiled
from ops.gemm.weight import LinearWeight, overwrite
from ops.registry import ShapeClass
from ops.stored import Stored, only_dense

# Measured on an H200 over whole layers of the 0.6B, 1.7B and 8B shapes in a graph (tests/ops/bench_cuda.py). What decides is
# where cuBLAS cannot fill the device with its tiles, and where it needs a second launch for the activation.
_FEW = 8  # rows up to which the stream of few_rows.cu wins at every size
_SMALL = 1 << 24  # elements; smaller matrices are streamed up to its last row
_NARROW, _HUGE = 2048, 65536  # out features: cuBLAS leaves the device half empty; the head of a vocabulary
_SHALLOW = 2048  # in features


def supports(case: ShapeClass) -> str | None:
    if case.device != "cuda":
        return f"it runs on CUDA, not on {case.device}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    return missing() or reference.supports(case)


class CudaLinearWeight(LinearWeight):
    def __init__(self, stored: Stored) -> None:
        weight, bias = only_dense(stored)
        assert weight is not None
        self._weight, self._bias = weight.contiguous(), bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._few = few_rows.fits(self._weight)
        self._tiled = tiled.missing() is None and tiled.fits(self._weight)

    def matmul(self, x: Tensor) -> Tensor:
        own = self._own(x.shape[0], gated=False)
        if own is None:
            return functional.linear(x, self._weight, self._bias)
        return own(x, self._weight, self._bias, gated=False)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        own = self._own(x.shape[0], gated=True)
        return None if own is None else own(x, self._weight, self._bias, gated=True)

    def _own(self, num_rows: int, *, gated: bool) -> Callable[..., Tensor] | None:
        """The kernel of ours that beats cuBLAS at so many rows."""
        small = self.out_features * self.in_features <= _SMALL
        if self._few and 0 < num_rows <= (few_rows.MOST_ROWS if small else _FEW):
            return few_rows.few_rows
        if not self._tiled or num_rows == 0:
            return None
        if self.out_features <= _NARROW and not gated:
            most_rows = tiled.MOST_ROWS
        elif gated or small or self.out_features >= _HUGE:
            most_rows = 64
        else:
            most_rows = 0
        shallow = small and not gated and self.in_features < _SHALLOW and num_rows <= 32
        return tiled.tiled if num_rows <= most_rows and not shallow else None

    def rows(self, ids: Tensor) -> Tensor:
        from ops.embedding.triton_embedding import embedding  # no CPU needs Triton

        return embedding(ids, self._weight)

    def refill(self, stored: Stored) -> bool:
        weight, bias = only_dense(stored, self._weight.dtype)
        overwrite(self._weight, weight, "weight")
        overwrite(self._bias, bias, "bias")
        return True
