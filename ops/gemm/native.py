"""Linear layers by oneloop_native: the weight packed once into panels of 16 output columns, its only copy.

Each output is one chain of fused multiply-adds over K in order, whatever the number of tokens beside it. Packing
leaves a seam for other stored types: the panels need not hold float32, only PackedLinear knows what they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.gemm.weight import LinearWeight
from ops.native import module as native


class NativeLinearWeight(LinearWeight):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = native.PackedLinear(weight, bias)
        self.nbytes = self._packed.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        self._packed.matmul(x, out)
        return out

    def matmul_into(self, x: Tensor, out: Tensor) -> None:
        """Both with their last dim contiguous."""
        self._packed.matmul(x, out)

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], self.in_features)
        self._packed.rows(ids, out)
        return out
