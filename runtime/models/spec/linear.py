"""Linear layers, which all blocks use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.weights.rules import Parameter


@dataclass(frozen=True, slots=True)
class Linear:
    """Matrix [out_features, in_features] at `name`.weight. `parts`: row counts of the matrices that are merged in it.

    `stack` and `float32`: see `Parameter`. `reduce`: columns are split when a model is sharded (sharding.py), so each output
    is a partial sum that an all-reduce completes."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    parts: tuple[int, ...] = ()
    stack: int = 0
    float32: bool = False
    reduce: bool = False

    def parameters(self) -> Iterator[Parameter]:
        """Yield the bias, then the weight: so the layer can be prepared as soon as its weight is read."""
        if self.bias:
            yield Parameter(f"{self.name}.bias", (self.out_features,), self.parts, self.stack, self.float32)
        shape = (self.out_features, self.in_features)
        yield Parameter(f"{self.name}.weight", shape, self.parts, self.stack, self.float32)
