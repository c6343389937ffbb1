"""As what each matrix of a model is read and kept: a decision about names and types, before a byte is read.

Matrices alone have a choice, since only their kernels read more than one type; everything else comes in the activations' dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.config import WeightPolicy
from runtime.weights.rules import BLOCKS, Load, moves_rows

NARROW = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Kept:
    """`wanted`: how matrices are to be kept. `dtype`: of activations. `types`: of the checkpoint's tensors. `block_types`: those
    that a kernel multiplies as they are; where there are none, the kernels also want weights of the activations' dtype."""

    wanted: WeightPolicy
    dtype: str
    types: Mapping[str, str]
    block_types: frozenset[str]

    def storage(self, load: Load) -> str:
        """A dtype or BLOCKS."""
        types = {self.types[shard.name] for shard in load.shards}
        whole_rows = load.transform is None or (moves_rows(load.transform) and len(load.shards) == 1)
        if whole_rows and self.wanted.keep_quantized and types <= self.block_types:
            return BLOCKS
        if self.wanted.dense_dtype != "stored":
            return self.wanted.dense_dtype
        narrow = {NARROW.get(each, self.dtype) for each in types}
        return narrow.pop() if self.block_types and len(narrow) == 1 else self.dtype
