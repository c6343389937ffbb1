"""A model's room for adapters: what each of its layers keeps of those in its slots, and which of them a step's tokens take.

Slots are written in the order of steps, by whoever computes them; to prepare an adapter is slow, and anybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import ops
from runtime.models.blocks.lora import LoraLinear, StepAdapters
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.linear import Linear


class AdapterRoom(NamedTuple):
    """For `num_slots` adapters at a time, none of a greater rank. `num_ready`: those that the host's memory has room for from the
    beginning, where it must be memory of a kind that is slow to get."""

    num_slots: int
    max_rank: int
    num_ready: int = 0


def adaptable(spec: DecoderSpec) -> list[Linear]:
    """The layers that may have adapters: every one that is computed for all tokens of a step. Not the head, which is computed for
    few, nor experts."""
    found: dict[str, Linear] = {}
    for name, block in spec.blocks():
        found |= {linear.name: linear for linear in block.linears(name, spec.hidden_size)}
    return [*found.values()]


class ModelAdapters:
    def __init__(self, layers: ops.LoraLayers, num_slots: int, step: StepAdapters) -> None:
        self.num_slots = num_slots
        self._layers, self._step = layers, step
        self._kept: dict[int, ops.PreparedLora] = {}

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
        slots = {name: linear.slots for name, linear in linears.items()}
        layers = ops.LoraLayers(slots, room.num_slots, torch.device(device), room.num_ready)
        return weights._replace(linears={**weights.linears, **linears}), cls(layers, room.num_slots, step)

    def prepared(self, parts: Mapping[str, Sequence[ops.LoraPart]]) -> ops.PreparedLora:
        """An adapter as `keep` takes it, given what it does to each layer. On any thread."""
        return self._layers.prepared(parts)

    def keep(self, key: int, adapter: ops.PreparedLora) -> None:
        """From now on slots may take it by this key. On any thread."""
        self._kept[key] = adapter

    def drop(self, key: int) -> None:
        """The contrary; slots that have taken it keep it."""
        if (adapter := self._kept.pop(key, None)) is not None:
            self._layers.release(adapter)

    def place(self, slot: int, key: int) -> None:
        """From the next step on, tokens of `slot` take this adapter, and no longer the one before."""
        self._layers.put(slot, self._kept[key])

    def begin(self, slots: Tensor | None) -> None:
        """A step begins, whose tokens have adapters in these slots, [T] int32, -1 for none; None: no token has one."""
        self._step.current = None if slots is None else ops.index_adapters(slots, self.num_slots)


def _slots(linear: Linear, base: ops.LinearWeight, room: AdapterRoom, dtype: str, device: str) -> ops.LoraSlots:
    """Adapters of a weight that is kept in 16 bits or fewer are kept in 16: what they take of memory counts as its own does."""
    size = linear.out_features, linear.in_features
    narrow = base.nbytes < 3 * size[0] * size[1]
    shape = ops.LoraShape(*size, linear.parts or size[:1], room.num_slots, room.max_rank, narrow)
    return ops.prepare_lora(shape, torch.float32 if linear.float32 else getattr(torch, dtype), torch.device(device))
