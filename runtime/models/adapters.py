"""A model's room for adapters: what each of its layers keeps of those in its slots, and which of them a step's tokens take.

Slots are written in the order of steps, by whoever computes them; to prepare an adapter is slow, and anybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ops
from runtime.models.blocks.lora import LoraLinear, StepAdapters
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.linear import Linear

PreparedAdapter = Mapping[str, Any]  # by layer, what its slots take


class AdapterRoom(NamedTuple):
    """For `num_slots` adapters at a time, none of a greater rank."""

    num_slots: int
    max_rank: int


def adaptable(spec: DecoderSpec) -> list[Linear]:
    """The layers that may have adapters: every one that is computed for all tokens of a step. Not the head, which is computed for
    few, nor experts."""
    found: dict[str, Linear] = {}
    for name, block in spec.blocks():
        found |= {linear.name: linear for linear in block.linears(name, spec.hidden_size)}
    return [*found.values()]


class ModelAdapters:
    def __init__(self, linears: Mapping[str, LoraLinear], num_slots: int, step: StepAdapters) -> None:
        self.num_slots = num_slots
        self._linears, self._step = linears, step
        self._kept: dict[int, PreparedAdapter] = {}
        self._taken: list[frozenset[str]] = [frozenset()] * num_slots  # layers that a slot's adapter changes

    @classmethod
    def around(
        cls, weights: Weights, spec: DecoderSpec, room: AdapterRoom, *, dtype: str, device: str
    ) -> tuple[Weights, ModelAdapters]:
        """Weights whose layers have that room, and what keeps it."""
        step = StepAdapters()
        linears = {
            linear.name: LoraLinear(
                weights.linears[linear.name], _slots(linear, weights.linears[linear.name], room, dtype, device), step
            )
            for linear in adaptable(spec)
        }
        return weights._replace(linears={**weights.linears, **linears}), cls(linears, room.num_slots, step)

    def prepared(self, parts: Mapping[str, Sequence[ops.LoraPart]]) -> PreparedAdapter:
        """An adapter as `keep` takes it, given what it does to each layer. On any thread."""
        return {name: self._linears[name].slots.prepared(some) for name, some in parts.items()}

    def keep(self, key: int, adapter: PreparedAdapter) -> None:
        """From now on slots may take it by this key. On any thread."""
        self._kept[key] = adapter

    def drop(self, key: int) -> None:
        """The contrary; slots that have taken it keep it."""
        self._kept.pop(key, None)

    def place(self, slot: int, key: int) -> None:
        """From the next step on, tokens of `slot` take this adapter, and no longer the one before."""
        adapter = self._kept[key]
        for name in self._taken[slot] - adapter.keys():
            self._linears[name].slots.put(slot, None)
        for name, share in adapter.items():
            self._linears[name].slots.put(slot, share)
        self._taken[slot] = frozenset(adapter)

    def begin(self, slots: Tensor | None) -> None:
        """A step begins, whose tokens have adapters in these slots, [T] int32, -1 for none; None: no token has one."""
        self._step.current = None if slots is None else ops.index_adapters(slots, self.num_slots)


def _slots(linear: Linear, base: ops.LinearWeight, room: AdapterRoom, dtype: str, device: str) -> ops.LoraSlots:
    """Adapters of a weight that is kept in 16 bits or fewer are kept in 16: what they take of memory counts as its own does."""
    size = linear.out_features, linear.in_features
    narrow = base.nbytes < 3 * size[0] * size[1]
    shape = ops.LoraShape(*size, linear.parts or size[:1], *room, narrow)
    return ops.prepare_lora(shape, torch.float32 if linear.float32 else getattr(torch, dtype), torch.device(device))
