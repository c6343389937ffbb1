"""A model's room for adapters: what each of its layers keeps of those in its slots, and which of them a step's tokens take.

Slots are written in the order of steps, by whoever computes them; to prepare an adapter is slow, and anybody's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import ops
from ops.moe.weights import Half
from runtime.models.blocks.lora import LoraExperts, LoraLinear, StepAdapters
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.models.spec.moe import Experts

_HALVES: tuple[Half, Half] = ("gate_up", "down")


class AdapterRoom(NamedTuple):
    """For `num_slots` adapters at a time, none of a greater rank. `num_ready`: those that the host's memory has room for from the
    beginning, where it must be memory of a kind that is slow to get. `experts`: on a device, where room is taken whether an adapter
    changes them or not."""

    num_slots: int
    max_rank: int
    num_ready: int = 0
    experts: bool = False


def adaptable(spec: DecoderSpec) -> list[Linear]:
    """The layers that may have adapters: every one that is computed for all tokens of a step. Not the head, which is computed for
    few, nor experts, which `expert_linears` gives."""
    found: dict[str, Linear] = {}
    for name, block in spec.blocks():
        found |= {linear.name: linear for linear in block.linears(name, spec.hidden_size)}
    return [*found.values()]


def expert_linears(spec: DecoderSpec) -> Iterator[tuple[Experts, dict[tuple[Half, int], Linear]]]:
    """For the experts of each layer, their matrices by half and number."""
    for experts in spec.experts():
        by_number = (experts.halves(number) for number in range(experts.num_experts))
        yield (
            experts,
            {
                (half, number): linear
                for number, halves in enumerate(by_number)
                for half, linear in zip(_HALVES, halves, strict=True)
            },
        )


class ModelAdapters:
    """`has_experts`: whether adapters may change experts, too."""

    def __init__(self, layers: ops.LoraLayers, num_slots: int, step: StepAdapters, *, has_experts: bool) -> None:
        self.num_slots, self.has_experts = num_slots, has_experts
        self._layers, self._step = layers, step
        step.changed = layers.changed
        self._kept: dict[int, ops.PreparedLora] = {}

    @classmethod
    def around(
        cls, weights: Weights, spec: DecoderSpec, room: AdapterRoom, *, dtype: str, device: str
    ) -> tuple[Weights, ModelAdapters]:
        """Weights whose layers have that room, and what keeps it."""
        step = StepAdapters()
        linears = {
            linear.name: LoraLinear(
                weights.linears[linear.name],
                _slots(linear, _bytes_each(weights.linears[linear.name]), room, dtype, device),
                step,
            )
            for linear in adaptable(spec)
        }
        slots = {name: linear.slots for name, linear in linears.items()}
        experts = dict(weights.experts)
        has_experts = room.experts or torch.device(device).type == "cpu"
        has_experts = has_experts and all(each.takes_adapters for each in experts.values())
        for of, by_half in expert_linears(spec) if has_experts else ():
            bytes_each = experts[of.name].nbytes / sum(
                each.out_features * each.in_features for each in by_half.values()
            )
            own = {
                place: (linear.name, _slots(linear, bytes_each, room, dtype, device, of_expert=True))
                for place, linear in by_half.items()
            }
            slots |= dict(own.values())
            experts[of.name] = LoraExperts(experts[of.name], own, step)
        layers = ops.LoraLayers(slots, room.num_slots, torch.device(device), room.num_ready)
        room_for_all = cls(layers, room.num_slots, step, has_experts=has_experts)
        return weights._replace(linears={**weights.linears, **linears}, experts=experts), room_for_all

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

    def has(self, key: int) -> bool:
        return key in self._kept

    def place(self, slot: int, key: int) -> None:
        """From the next step on, tokens of `slot` take this adapter, and no longer the one before."""
        self._layers.put(slot, self._kept[key])

    def begin(self, slots: Tensor | None) -> None:
        """A step begins, whose tokens have adapters in these slots, [T] int32, -1 for none; None: no token has one."""
        self._step.current = None if slots is None else ops.index_adapters(slots, self.num_slots)


def _slots(
    linear: Linear, bytes_each: float, room: AdapterRoom, dtype: str, device: str, *, of_expert: bool = False
) -> ops.LoraSlots:
    """`bytes_each`: what a number of the layer's weight takes. Adapters of one that is kept in 16 bits or fewer are kept in 16:
    what they take of memory counts as its own does."""
    size = linear.out_features, linear.in_features
    shape = ops.LoraShape(*size, linear.parts or size[:1], room.num_slots, room.max_rank, bytes_each < 3, of_expert)
    kept = torch.float32 if linear.float32 else getattr(torch, dtype)
    return ops.prepare_lora(shape, kept, torch.device(device))


def _bytes_each(weight: ops.LinearWeight) -> float:
    return weight.nbytes / (weight.out_features * weight.in_features)
