"""LinearWeight: a weight matrix in its kernel's own form, prepared once at load.

Only the kernel that made the form can read it; callers see shapes and bytes only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ops import tuning
from ops.activation import silu_mul
from ops.gemm.low_rank import LowRank
from ops.gemm.rounded import RoundedRows
from ops.norm import add_rms_norm, rms_norm
from ops.stored import Stored

if TYPE_CHECKING:
    from ops.lora.share import TokenAdapters


class LinearWeight(ABC):
    """Weight [out_features, in_features] with its bias. `nbytes`: memory, padding included. `next_bytes`: memory that a step
    reads after this weight; kernels of few rows may prefetch part of it (`read_in_turn`)."""

    out_features: int
    in_features: int
    nbytes: int
    next_bytes: Tensor | None = None

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias for x [T, in_features], as [T, out_features]."""

    def of(self, adapters: TokenAdapters | None) -> LinearWeight:
        """Return the layer for tokens that have these adapters."""
        return self

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        """Return silu(first half) * second half of x @ weight.T + bias, [T, out_features / 2], if one kernel does; else None."""
        return None

    def activated_matmul(self, x: Tensor, activation: str) -> Tensor | None:
        """Return `activation` of x @ weight.T + bias, [T, out_features], if one kernel computes it, no less exactly than
        two; else None."""
        return None

    def takes_low_rank(self, num_rows: int, *, gated: bool) -> bool:
        """Return whether `matmul_plus` exists and is the fastest for `num_rows`."""
        return False

    def matmul_plus(self, x: Tensor, low: LowRank, *, gated: bool) -> Tensor:
        """Return `matmul`, or `gated_matmul`, of x with `low` added to each row before rounding."""
        raise NotImplementedError

    def matmul_of_gated(self, gate_up: Tensor) -> Tensor:
        """Return `matmul` of silu of the first half of gate_up [T, 2 * in_features] times the second half."""
        return self.matmul(silu_mul(gate_up))

    def first_bytes(self) -> Tensor | None:
        """Return the memory that kernels of few rows read first, contiguous, if prefetching it pays."""
        return None

    def normed(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor | RoundedRows:
        """Add x, if given, to residual [T, in_features] in place; return its RMS norm by `weight` in the form that this
        layer multiplies: plain, or quantised as RoundedRows."""
        return rms_norm(residual, weight, eps) if x is None else add_rms_norm(x, residual, weight, eps)

    def matmul_rounded(self, x: RoundedRows) -> Tensor:
        """Return x @ weight.T + bias for quantised rows x, a result of `normed`."""
        raise TypeError("this layer rounds nothing")

    def gated_matmul_rounded(self, x: RoundedRows) -> Tensor | None:
        """Return `gated_matmul` for quantised rows x, a result of `normed`; None if no single kernel computes it."""
        raise TypeError("this layer rounds nothing")

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of the weight, [T, in_features], without bias: a tied embedding."""

    @abstractmethod
    def refill(self, stored: Stored) -> bool:
        """Replace the weight, the bias or both by values of the same shape. No step may be in progress.

        Return True if the addresses are unchanged, so captured graphs stay valid; False if compiled stacks of this weight
        must be rebuilt. Raises ValueError for another shape, or a format that this kernel does not keep."""


def check_refill(name: str, given: Iterable[int], current: Iterable[int]) -> None:
    """Raise ValueError if the shapes differ."""
    new, old = list(given), list(current)
    if new != old:
        raise ValueError(f"{name} has shape {new} where the model has {old}")


def overwrite(current: Tensor | None, given: Tensor | None, name: str) -> None:
    """Copy new values to the same address. Raises ValueError."""
    if given is None:
        return
    if current is None:
        raise ValueError(f"there is no {name} to be replaced")
    check_refill(name, given.shape, current.shape)
    current.copy_(given)


def read_in_turn(weights: Sequence[LinearWeight]) -> None:
    """Set for each weight the next weight that a step reads; the last one is followed by the first.

    Kernels prefetch the next weight into L2 while small kernels, norms and attention leave memory bandwidth idle."""
    for each, following in zip(weights, [*weights[1:], *weights[:1]], strict=True):
        read = following.first_bytes()
        if read is None or not read.is_cuda:
            continue
        num_bytes = min(read.nbytes, tuning.of(read.device).linear.max_ahead_bytes or 0) // 16 * 16
        each.next_bytes = read.view(-1).view(torch.uint8)[:num_bytes] if num_bytes else None
