"""Linear layers with a separate small matrix for each head.

On a CPU, each matrix is packed like any linear layer, so a token's result does not depend on other tokens of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ops.gemm.native import NativeLinearWeight
from ops.gemm.weight import check_refill
from ops.stored import StoredWeight


class HeadsWeight(ABC):
    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return x [T, heads, K] multiplied by each head's matrix: [T, heads, N]."""

    @abstractmethod
    def refill(self, weight: Tensor) -> None:
        """Replace the weights by `weight` [heads, N, K]. Raises ValueError if the shape differs."""


class NativeHeadsWeight(HeadsWeight):
    def __init__(self, weight: Tensor) -> None:
        self._heads = [NativeLinearWeight(StoredWeight.dense(each)) for each in weight]
        self._shape = weight.shape
        self._out_features = weight.shape[1]

    def refill(self, weight: Tensor) -> None:
        check_refill("weight", weight.shape, self._shape)
        for head, each in zip(self._heads, weight, strict=True):
            head.refill(StoredWeight.dense(each))

    def matmul(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], len(self._heads), self._out_features)
        for head, weight in enumerate(self._heads):
            weight.matmul_into(x[:, head], out[:, head])
        return out


class ReferenceHeadsWeight(HeadsWeight):
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.transpose(1, 2).contiguous()  # [heads, K, N]

    def refill(self, weight: Tensor) -> None:
        check_refill("weight", weight.transpose(1, 2).shape, self._weight.shape)
        self._weight.copy_(weight.transpose(1, 2))

    def matmul(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
