"""LinearWeight: a weight matrix in whatever form its kernel wants to read, prepared once at load.

The form belongs to the kernel that made it; callers see shapes and bytes only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from ops.activation import silu_mul
from ops.stored import Stored


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

    def matmul_of_gated(self, gate_up: Tensor) -> Tensor:
        """`matmul` of silu of the first half of gate_up [T, 2 * in_features] times the second."""
        return self.matmul(silu_mul(gate_up))

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] int64 of the weight, [T, in_features], without bias: a tied embedding."""

    @abstractmethod
    def refill(self, stored: Stored) -> bool:
        """Take other numbers of the same shape, a weight, a bias or both; what is not given stays. True: at the addresses of the
        old ones, so that whatever holds them (a captured graph) computes with the new; False: elsewhere, so that compiled stacks
        of this weight must be made anew. No step may be under way.

        Raises ValueError for another shape, or a format that this kernel does not keep."""


def check_refill(name: str, given: Iterable[int], current: Iterable[int]) -> None:
    """Raises ValueError where the shapes differ."""
    new, old = list(given), list(current)
    if new != old:
        raise ValueError(f"{name} has shape {new} where the model has {old}")


def overwrite(current: Tensor | None, given: Tensor | None, name: str) -> None:
    """Other numbers at the same address. Raises ValueError."""
    if given is None:
        return
    if current is None:
        raise ValueError(f"there is no {name} to be replaced")
    check_refill(name, given.shape, current.shape)
    current.copy_(given)
