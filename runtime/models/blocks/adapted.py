"""A matrix with adapters: small products beside it, of the same input, added to what it gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ops


class AdaptedLinear(ops.LinearWeight):
    """`adapters`: each two matrices, one behind the other; their outputs, side by side, are as wide as that of `weight`."""

    def __init__(self, weight: ops.LinearWeight, adapters: Sequence[tuple[ops.LinearWeight, ops.LinearWeight]]) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.nbytes = weight.nbytes + sum(each.nbytes for adapter in adapters for each in adapter)
        self._weight, self._adapters = weight, adapters

    def matmul(self, x: Tensor) -> Tensor:
        parts = [ops.linear(ops.linear(x, first), second) for first, second in self._adapters]
        return ops.linear(x, self._weight).add_(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def refill(self, stored: ops.Stored) -> bool:
        raise TypeError("the matrix and its adapters are refilled each by itself")

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a matrix with adapters is no embedding")
