"""Linear layers in plain torch: weights as loaded, any float dtype, any device."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ops.gemm.weight import LinearWeight, overwrite
from ops.registry import ShapeClass
from ops.stored import Stored, only_dense


def supports(case: ShapeClass) -> str | None:
    """Return a refusal unless weights are plain numbers of the activations' dtype."""
    other = [each for each in case.weight if each.dtype != case.dtype]
    return f"it multiplies plain numbers of the activations' dtype, not {', '.join(map(str, other))}" if other else None


class ReferenceLinearWeight(LinearWeight):
    def __init__(self, stored: Stored) -> None:
        weight, bias = only_dense(stored)
        assert weight is not None
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def matmul(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._weight)

    def refill(self, stored: Stored) -> bool:
        weight, bias = only_dense(stored, self._weight.dtype)
        overwrite(self._weight, weight, "weight")
        overwrite(self._bias, bias, "bias")
        return True
