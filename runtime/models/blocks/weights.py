"""Weights: tensors from which blocks are built, by their names in the spec.

A block that derives a tensor from a parameter (`derive`) registers a function that updates the tensor. The parameter can then be
replaced (parameters.py), although the original is freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from torch import Tensor

import ops
from runtime.models.spec.decoder import DecoderSpec
from runtime.parallel.group import Peers


class Weights(NamedTuple):
    """Weights of a model.

    - `linears`: prepared matrices, by the names of `spec.linears()`
    - `experts`: expert matrices, by the names of `spec.experts()`
    - `tensors`: all other parameters, by name
    - `recipes`: by parameter name, functions that update the tensors derived from it
    - `kv_scales`: by layer, scales of an fp8 KV cache's keys and values, if the checkpoint has them
    - `sums`: by the name of a norm that sums its input over ranks first, the ranks
    - `counts`: by the names of `spec.experts()`, number of tokens of each expert [E] int64, if counted"""

    linears: Mapping[str, ops.LinearWeight]
    tensors: Mapping[str, Tensor]
    experts: Mapping[str, ops.ExpertWeights]
    recipes: dict[str, list[Callable[[Tensor], None]]]
    kv_scales: Mapping[str, tuple[float, float]] = MappingProxyType({})
    sums: Mapping[str, Peers] = MappingProxyType({})
    counts: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        kinds = (self.linears, self.tensors, self.experts)
        return sum(each.nbytes for kind in kinds for each in kind.values())

    def derive(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `make(parameter)` for the parameter `name`. The result is updated in place when the parameter is replaced."""
        made = make(self.tensors[name])

        def write(values: Tensor) -> None:
            made.copy_(make(values))

        self.recipes.setdefault(name, []).append(write)
        return made

    def derive_heads(self, name: str, make: Callable[[Tensor], Tensor]) -> ops.HeadsWeight:
        """Return `make(parameter)` for the parameter `name`, prepared as one matrix per head. It is updated when the parameter
        is replaced."""
        heads = ops.prepare_heads(make(self.tensors[name]))
        self.recipes.setdefault(name, []).append(lambda values: heads.refill(make(values)))
        return heads


class ExpertHalf(NamedTuple):
    """Place of a checkpoint's matrix in the experts named `experts`: which half of the expert with number `number`."""

    experts: str
    half: Literal["gate_up", "down"]
    number: int


def expert_halves(spec: DecoderSpec) -> dict[str, ExpertHalf]:
    """Return the `ExpertHalf` of every expert matrix, by parameter name."""
    found = {}
    for experts in spec.experts():
        for number in range(experts.num_experts):
            gate_up, down = experts.halves(number)
            found[f"{gate_up.name}.weight"] = ExpertHalf(experts.name, "gate_up", number)
            found[f"{down.name}.weight"] = ExpertHalf(experts.name, "down", number)
    return found
