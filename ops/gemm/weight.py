"""LinearWeight: a weight matrix in whatever form its kernel wants to read, prepared once at load.

The form belongs to the kernel that made it; callers see shapes and bytes only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a weight as a GGUF file stores them: `type` is ggml's name of its blocks ("Q4_1"), data [rows, row bytes] uint8."""

    type: str
    data: Tensor


class LinearWeight(ABC):
    """A weight [out_features, in_features] with its bias. `nbytes` is what it keeps in memory, padding included."""

    out_features: int
    in_features: int
    nbytes: int

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> x @ weight.T + bias, [T, out_features]."""

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        """silu of the first half of x @ weight.T + bias times the second, [T, out_features / 2], if that is one kernel."""
        return None

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] int64 of the weight, [T, in_features], without bias: a tied embedding."""
