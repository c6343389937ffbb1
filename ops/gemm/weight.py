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
    """Weight [out_features, in_features] with its bias. `nbytes`: memory including padding. `next_bytes`: memory of the weight that
    a step reads next, part of which kernels with few rows may prefetch (`read_in_turn`)."""

    out_features: int
    in_features: int
    nbytes: int
    next_bytes: Tensor | None = None

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias for x [T, in_features], as [T, out_features]."""

    def of(self, adapters: TokenAdapters | None) -> LinearWeight:
        """Return this layer for tokens that have the LoRA adapters `adapters`."""
        return self

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        """Return silu(first half) * second half [T, out_features / 2] of x @ weight.T + bias; None if no single kernel computes
        it."""
        return None

    def activated_matmul(self, x: Tensor, activation: str) -> Tensor | None:
        """Return `activation` of x @ weight.T + bias [T, out_features]; None if no single kernel computes it as exactly as two
        kernels."""
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
        """Return the contiguous memory that kernels with few rows read first; None if prefetching it is not useful."""
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
        """Return rows `ids` [T] int64 of the weight, without bias: [T, in_features]. Used as embedding if that is tied to the
        head."""

    @abstractmethod
    def refill(self, stored: Stored) -> bool:
        """Replace the weight, the bias or both by values of the same shape. No step may be in progress.

        Return True if the addresses are unchanged, so captured graphs stay valid; False if compiled stacks of this weight
        must be rebuilt. Raises ValueError for another shape, or a format that this kernel does not keep."""


def check_refill(name: str, given: Iterable[int], current: Iterable[int]) -> None:
    """Raise ValueError if shape `given` differs from shape `current` of the parameter `name`."""
    new, old = list(given), list(current)
    if new != old:
        raise ValueError(f"{name} has shape {new} where the model has {old}")


def overwrite(current: Tensor | None, given: Tensor | None, name: str) -> None:
    """Copy `given`, if any, into the memory of `current`. Raises ValueError if shapes differ or `current` is None."""
    if given is None:
        return
    if current is None:
        raise ValueError(f"there is no {name} to be replaced")
    check_refill(name, given.shape, current.shape)
    current.copy_(given)


def read_in_turn(weights: Sequence[LinearWeight]) -> None:
    """Set `next_bytes` of each weight to the weight that a step reads next; the first one follows the last.

    Kernels prefetch that weight into L2 while small kernels, norms and attention do not use all memory bandwidth."""
    for each, following in zip(weights, [*weights[1:], *weights[:1]], strict=True):
        read = following.first_bytes()
        if read is None or not read.is_cuda:
            continue
        num_bytes = min(read.nbytes, tuning.of(read.device).linear.max_ahead_bytes or 0) // 16 * 16
        each.next_bytes = read.view(-1).view(torch.uint8)[:num_bytes] if num_bytes else None
