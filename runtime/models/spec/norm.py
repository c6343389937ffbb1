"""Specs of norms: of the residual stream, of a block's output, and of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.weights.rules import Parameter


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight. The weight is optional."""

    eps: float
    weight: bool = True

    def parameters(self, name: str, *sizes: int) -> Iterator[Parameter]:
        """Yield the norm's weight, if it has one. `sizes`: sizes of the vectors that are concatenated in it."""
        if self.weight:
            yield Parameter(f"{name}.weight", (sum(sizes),), sizes)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. Weight and bias are optional."""

    eps: float
    weight: bool = True
    bias: bool = True

    def parameters(self, name: str, *sizes: int) -> Iterator[Parameter]:
        if self.weight:
            yield Parameter(f"{name}.weight", (sum(sizes),), sizes)
        if self.bias:
            yield Parameter(f"{name}.bias", (sum(sizes),), sizes)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """Norm that returns x unchanged."""

    def parameters(self, name: str, *sizes: int) -> Iterator[Parameter]:
        yield from ()


Norm = RMSNorm | LayerNorm | NoNorm
