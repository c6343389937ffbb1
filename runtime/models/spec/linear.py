"""Specs of linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.weights.rules import Parameter


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer with the matrix [out_features, in_features] `name`.weight. `parts`: row counts of the stored matrices that are
    merged in it.

    `stack`, `float32`: see `Parameter`. `reduce`: when a model is sharded, the columns are split (sharding.py). Each output is
    then a partial sum that an all-reduce completes."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    parts: tuple[int, ...] = ()
    stack: int = 0
    float32: bool = False
    reduce: bool = False

    def parameters(self) -> Iterator[Parameter]:
        """Yield the bias, then the weight. In this order the layer can be prepared as soon as its weight is read."""
        if self.bias:
            yield Parameter(f"{self.name}.bias", (self.out_features,), self.parts, self.stack, self.float32)
        shape = (self.out_features, self.in_features)
        yield Parameter(f"{self.name}.weight", shape, self.parts, self.stack, self.float32)
