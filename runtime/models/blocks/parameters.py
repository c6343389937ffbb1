"""Parameters of a loaded decoder, by name. They can be replaced between steps.

Values are changed in place, so captured CUDA graphs stay valid. Exception: on a CPU, a packed weight gets a new address, and
traced layers with the old address are discarded. This module is independent of checkpoint files and loading rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

import ops
from runtime.models.blocks.weights import Weights, expert_halves
from runtime.models.spec.decoder import DecoderSpec
from runtime.weights.rules import WeightsError, shape_text


class HoldsTraces(Protocol):
    def forget(self) -> None:
        """Drop traced programs, since they reference old weights."""
        ...


class Parameters:
    """Parameters of a decoder, by the names in `spec.parameters()`, in the formats of `weights`."""

    def __init__(self, spec: DecoderSpec, weights: Weights) -> None:
        self.trace_holders: WeakSet[HoldsTraces] = WeakSet()
        self._shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
        self._linears = {f"{name}.weight": linear for name, linear in weights.linears.items()}
        self._halves, self._experts = expert_halves(spec), weights.experts
        self._recipes: dict[str, list[Callable[[Tensor], None]]] = weights.recipes
        self._tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in self._recipes}
        self._dtypes = {name: weights.tensors[name].dtype for name in self._recipes}

    def load(self, name: str, stored: ops.Stored) -> None:
        """Replace the values of parameter `name`. `stored`: a matrix, with or without its bias, or a bias alone. No step may be in
        flight. Raises WeightsError if the model has no parameter `name`, or if shape or format differ."""
        if name not in self._shapes:
            raise WeightsError(f"the model has no parameter {name}")
        weight_name = name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name
        try:
            if weight_name in self._linears or weight_name in self._halves:
                self._refill(weight_name, stored if weight_name == name else _as_bias(stored))
            else:
                self._overwrite(name, stored)
        except ValueError as error:
            raise WeightsError(f"{name}: {error}") from error

    def _refill(self, name: str, stored: ops.Stored) -> None:
        if name in self._halves:
            experts, half, number = self._halves[name]
            self._experts[experts].fill(half, number, stored)
        elif not self._linears[name].refill(stored):
            for holder in self.trace_holders:
                holder.forget()

    def _overwrite(self, name: str, stored: ops.Stored) -> None:
        current = self._tensors.get(name)
        dtype = self._dtypes[name] if current is None else current.dtype
        if not isinstance(stored, ops.StoredWeight) or stored.format.dtype != dtype:
            raise ValueError(f"only plain numbers in {dtype} can take the place of what is there".replace("torch.", ""))
        if stored.weight.shape != self._shapes[name]:
            shapes = shape_text(tuple(stored.weight.shape)), shape_text(self._shapes[name])
            raise ValueError(f"its shape is {shapes[0]} instead of {shapes[1]}")
        if current is not None:
            current.copy_(stored.weight)
        for write in self._recipes.get(name, ()):
            write(stored.weight)


def _as_bias(stored: ops.Stored) -> ops.StoredWeight:
    if not isinstance(stored, ops.StoredWeight):
        raise ValueError("a bias is one vector")
    return ops.StoredWeight(stored.format, {"bias": stored.weight})
