"""Norms over the hidden size, each with an optional addition to the residual stream before it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

import ops
from ops.symbols import NotTraceable, Symbol
from runtime.models.blocks.weights import Weights
from runtime.models.spec.norm import LayerNorm, NoNorm, Norm, RMSNorm
from runtime.parallel.group import Peers


class NormBlock(Protocol):
    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., H] as a new tensor of the same shape."""
        ...

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add x [T, H], if any, to `residual` [T, H] in place, and return the norm of `residual` [T, H]."""
        ...

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the norm of x + y [T, H] when the sum itself is not needed. `y` may be overwritten."""
        ...

    def add_for(self, linear: ops.LinearWeight, x: Tensor | None, residual: Tensor) -> Tensor | ops.RoundedRows:
        """Do as `add`, for an output that only `linear` reads. The output may be quantised rows."""
        ...


class _ForAll:
    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        raise NotImplementedError

    def add_for(self, linear: ops.LinearWeight, x: Tensor | None, residual: Tensor) -> Tensor | ops.RoundedRows:
        return self.add(x, residual)


class RMSNormBlock:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if x is None:
            return ops.rms_norm(residual, self._weight, self._eps)
        return ops.add_rms_norm(x, residual, self._weight, self._eps)

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, y)

    def add_for(self, linear: ops.LinearWeight, x: Tensor | None, residual: Tensor) -> Tensor | ops.RoundedRows:
        return ops.normed_for(linear, x, residual, self._weight, self._eps)


class LayerNormBlock(_ForAll):
    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if x is None:
            return ops.layer_norm(residual, self._weight, self._bias, self._eps)
        return ops.add_layer_norm(x, residual, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.layer_norm_of_sum(x, y, self._weight, self._bias, self._eps)


class NoNormBlock(_ForAll):
    """Block without a norm: `add` only adds. `forward` and `add` may return their arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if x is not None:
            residual += x
        return residual

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, y)


class SummedRMSNormBlock(RMSNormBlock):
    """RMSNorm of a sharded model. Its `add` first sums x over all ranks, in the same kernel."""

    def __init__(self, weight: Tensor, eps: float, peers: Peers) -> None:
        super().__init__(weight, eps)
        self._peers = peers

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if x is None:
            return super().add(x, residual)
        _refuse_trace(x)
        return self._peers.add_rms_norm(x, residual, self._weight, self._eps)

    def add_for(self, linear: ops.LinearWeight, x: Tensor | None, residual: Tensor) -> Tensor | ops.RoundedRows:
        return self.add(x, residual)


class SummedNormBlock(_ForAll):
    """Norm of a sharded model, other than RMSNorm. Its `add` first sums x over all ranks."""

    def __init__(self, norm: NormBlock, peers: Peers) -> None:
        self._norm, self._peers = norm, peers
        self.forward = norm.forward

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if x is not None:
            _refuse_trace(x)
            x = self._peers.sum(x)
        return self._norm.add(x, residual)

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        _refuse_trace(x)
        return self._norm.of_sum(self._peers.sum(x), y)


def _refuse_trace(x: Tensor) -> None:
    if isinstance(x, Symbol):
        raise NotTraceable("a norm of what is summed over several devices")


def build_norm(norm: Norm, name: str, weights: Weights) -> NormBlock:
    peers = weights.sums.get(name)
    if peers is None:
        return _norm(norm, name, weights)
    if isinstance(norm, RMSNorm):
        return SummedRMSNormBlock(weights.tensors[f"{name}.weight"], norm.eps, peers)
    return SummedNormBlock(_norm(norm, name, weights), peers)


def _norm(norm: Norm, name: str, weights: Weights) -> NormBlock:
    match norm:
        case RMSNorm(eps):
            return RMSNormBlock(weights.tensors[f"{name}.weight"], eps)
        case LayerNorm(eps):
            return LayerNormBlock(weights.tensors.get(f"{name}.weight"), weights.tensors.get(f"{name}.bias"), eps)
        case NoNorm():
            return NoNormBlock()
