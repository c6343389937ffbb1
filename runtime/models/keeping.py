"""Keeping: as what each matrix of a model is read and kept, a decision about names and formats before a byte is read.

Matrices alone have a choice, since only their kernels read more than one format; all else comes in the activations' dtype."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass

from runtime.config import WeightPolicy
from runtime.weights.rules import AS_STORED, Load, Span, moves_rows

NARROW = {"BF16": "bfloat16", "F16": "float16"}
_PLAIN = frozenset({"F32", *NARROW})
# Stored formats of the same bits, by `WeightPolicy.online`: rounding them again would only lose precision.
_ALREADY: Mapping[str | None, Set[str]] = {"int8": {"Q8_0", "w8"}, "int16": set(), "fp8": {"fp8"}, "w4": {"w4"}}

Refusal = Callable[[frozenset[str]], str | None]


_BLOCK = 256  # columns; whatever a block has divides it


def _whole_blocks(columns: Span | None) -> bool:
    return columns is None or not (columns.start % _BLOCK or columns.stop % _BLOCK)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Decision how each matrix is stored. `policy`: the requested policy. `dtype`: of activations. `types`: of the
    checkpoint's tensors. `rounded`: names of the parameters that are rounded at load."""

    policy: WeightPolicy
    dtype: str
    types: Mapping[str, str]
    rounded: Collection[str] = ()

    def storage(self, load: Load, refusal: Refusal) -> str:
        """A dtype or AS_STORED. `refusal`: why no kernel multiplies rows of these formats, None where one does."""
        types = self._types(load)
        if self._stays(load) and refusal(types) is None:
            return AS_STORED
        if self.policy.dense_dtype != "stored":
            return self.policy.dense_dtype
        narrow = {NARROW.get(each, self.dtype) for each in types}
        return narrow.pop() if len(narrow) == 1 and refusal(frozenset(narrow)) is None else self.dtype

    def widened(self, load: Load, refusal: Refusal) -> str | None:
        """Return a message about quantised rows that become plain numbers against the policy, or None."""
        if not self.policy.keep_quantized or self._types(load) <= _PLAIN or self.storage(load, refusal) == AS_STORED:
            return None
        types = ", ".join(sorted(self._types(load)))
        if load.parameter.name in self.rounded:
            return f"weights in {types} are decoded, and rounded to {self.policy.online}"
        why = (
            refusal(self._types(load))
            if self._stays(load)
            else "what is wanted of them is not whole blocks in their order"
        )
        return f"weights in {types} become {self.storage(load, refusal)}: {why}"

    def _types(self, load: Load) -> frozenset[str]:
        return frozenset(self.types[shard.name] for shard in load.shards)

    def _stays(self, load: Load) -> bool:
        whole_rows = load.transform is None or (moves_rows(load.transform) and len(load.shards) == 1)
        whole_rows = whole_rows and load.cut is None and all(_whole_blocks(shard.columns) for shard in load.shards)
        return whole_rows and self._may_stay(load) and not self._types(load) & _PLAIN

    def _may_stay(self, load: Load) -> bool:
        """Return whether quantised rows should stay as stored. Matrices to be rounded stay only if they have the target
        format already."""
        if load.parameter.name in self.rounded and not self._types(load) <= _ALREADY[self.policy.online]:
            return False
        return self.policy.keep_quantized
