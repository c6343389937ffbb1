"""Linear layers in plain torch: the weight as it came, any float dtype, any device."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ops.gemm.weight import LinearWeight


class ReferenceLinearWeight(LinearWeight):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def matmul(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._weight)
