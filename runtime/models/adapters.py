"""LoRA adapter slots of a model: memory for adapters in each layer, and the slot of each token of a step.

The thread that computes steps writes the slots, in step order. Preparing an adapter is slow and may be done on any thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import ops
from ops.moe.weights import Half
from runtime.models.blocks.lora import LoraEmbedding, LoraExperts, LoraLinear
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import EMBEDDING, HEAD, DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import Experts
from runtime.models.spec.sharding import cuts
from runtime.weights.rules import Cut, Span

_HALVES: tuple[Half, Half] = ("gate_up", "down")


class AdapterRoom(NamedTuple):
    """Memory limits of LoRA adapters: `num_slots` adapters of rank up to `max_rank` on the device.

    `num_ready`: number of adapters for which pinned host memory is allocated at start-up, because allocation is slow. `experts`,
    `vocabulary`: on a device, allocate slots for experts, or for embedding and head, even before an adapter changes them."""

    num_slots: int
    max_rank: int
    num_ready: int = 0
    experts: bool = False
    vocabulary: bool = False


def adaptable(spec: DecoderSpec) -> list[Linear]:
    """Return the linear layers that may have adapters: all that compute every token of a step. Embedding, head and experts are not
    included."""
    found: dict[str, Linear] = {}
    for name, block in spec.blocks():
        found |= {linear.name: linear for linear in block.linears(name, spec.hidden_size)}
    return [*found.values()]


def vocabulary_linears(spec: DecoderSpec) -> list[Linear]:
    """Return the linear layers at embedding and head that may have adapters: projections, and the head under its own name even if
    it is tied."""
    size = spec.embedding_size or spec.hidden_size
    return [*spec.projections, *([Linear(HEAD, spec.vocab_rows, size)] if spec.generates else [])]


def embedding_linear(spec: DecoderSpec) -> Linear:
    """Return the embedding as a linear layer [H, V]. Its adapters have a matrix A with one column per token id."""
    return Linear(EMBEDDING, spec.embedding_size or spec.hidden_size, spec.vocab_rows)


def expert_linears(spec: DecoderSpec) -> Iterator[tuple[Experts, dict[tuple[Half, int], Linear]]]:
    """Yield (experts of a layer, their linear layers by half and expert number)."""
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
    """Adapters of a model. `has_experts`: adapters may change experts. `has_vocabulary`: they may change embedding and head. `own`:
    this rank's slice of each layer that is split over ranks."""

    def __init__(
        self, slots: Mapping[str, ops.LoraSlots], room: AdapterRoom, device: str, changed: Counter[str],
        own: Mapping[str, Cut], *, has_experts: bool, has_vocabulary: bool,
    ) -> None:  # fmt: skip
        self.num_slots, self.has_experts, self.has_vocabulary = room.num_slots, has_experts, has_vocabulary
        self._names, self._own = frozenset(slots), own
        self._layers = ops.LoraLayers(slots, room.num_slots, torch.device(device), room.num_ready, changed)
        self._kept: dict[int, ops.PreparedLora] = {}

    @classmethod
    def around(
        cls, weights: Weights, spec: DecoderSpec, room: AdapterRoom, *, dtype: str, device: str
    ) -> tuple[Weights, ModelAdapters]:
        """Return (`weights` with adapter slots, manager of the slots). On a shard, call this before `put_together`."""
        make = _Maker(room, dtype, device)
        linears, tensors, experts = dict(weights.linears), dict(weights.tensors), dict(weights.experts)
        on_host = torch.device(device).type == "cpu"
        for linear in adaptable(spec):
            linears[linear.name] = make.linear(linear, linears[linear.name])
        has_vocabulary = room.vocabulary or on_host
        if has_vocabulary:
            for linear in vocabulary_linears(spec):
                name = spec.head.name if linear.name == HEAD else linear.name
                linears[name] = make.linear(linear, linears[name])
            if EMBEDDING not in linears:
                table = ops.StoredWeight.dense(tensors.pop(f"{EMBEDDING}.weight"))
                linears[EMBEDDING] = ops.prepare_linear(table, getattr(torch, dtype))
            linears[EMBEDDING] = make.embedding(embedding_linear(spec), linears[EMBEDDING])
        has_experts = (room.experts or on_host) and all(each.takes_adapters for each in experts.values())
        for of, by_half in expert_linears(spec) if has_experts else ():
            experts[of.name] = make.experts(experts[of.name], by_half)
        adapters = cls(
            make.slots, room, device, make.changed, _own(spec), has_experts=has_experts, has_vocabulary=has_vocabulary
        )
        return weights._replace(linears=linears, tensors=tensors, experts=experts), adapters

    def prepared(self, parts: Mapping[str, Sequence[ops.LoraPart]]) -> ops.PreparedLora:
        """Convert an adapter for `keep`. `parts`: its matrices by layer name of the whole model. Thread-safe."""
        own = {name: [*self._own_parts(name, some)] for name, some in parts.items() if name in self._names}
        return self._layers.prepared({name: some for name, some in own.items() if some})

    def _own_parts(self, name: str, parts: Sequence[ops.LoraPart]) -> Iterator[ops.LoraPart]:
        cut = self._own.get(name)
        for part in parts:
            own = part if cut is None else _share(part, cut)
            if own is not None:
                yield own

    def keep(self, key: int, adapter: ops.PreparedLora) -> None:
        """Store an adapter in host memory under the number `key`, so that `place` can load it. Thread-safe."""
        self._kept[key] = adapter

    def drop(self, key: int) -> None:
        """Remove adapter `key` from host memory. Slots into which it was loaded are unchanged."""
        if (adapter := self._kept.pop(key, None)) is not None:
            self._layers.release(adapter)

    def has(self, key: int) -> bool:
        return key in self._kept

    def place(self, slot: int, key: int) -> None:
        """Load adapter `key` into `slot` from the next step on."""
        self._layers.put(slot, self._kept[key])

    def of_tokens(self, slots: Tensor | None) -> ops.TokenAdapters | None:
        """Return the adapters of a step's tokens in the form that layers read. slots [T] int32: -1 for none. None if `slots` is
        None."""
        return None if slots is None else ops.index_adapters(slots, self.num_slots)


class _Maker:
    """Builder of layers with adapter slots. `slots`: all slots built so far, by the layer names that adapters use."""

    def __init__(self, room: AdapterRoom, dtype: str, device: str) -> None:
        self.changed: Counter[str] = Counter()  # see `ops.LoraLayers`
        self.slots: dict[str, ops.LoraSlots] = {}
        self._room, self._dtype, self._device = room, getattr(torch, dtype), torch.device(device)

    def linear(self, linear: Linear, weight: ops.LinearWeight) -> LoraLinear:
        self.slots[linear.name] = slots = ops.prepare_lora(*self._shape(linear, _bytes_each(weight)))
        return LoraLinear(weight, slots)

    def embedding(self, linear: Linear, weight: ops.LinearWeight) -> LoraEmbedding:
        self.slots[linear.name] = slots = ops.prepare_embedding_lora(*self._shape(linear, _bytes_each(weight)))
        return LoraEmbedding(weight, slots)

    def experts(self, weights: ops.ExpertWeights, by_half: Mapping[tuple[Half, int], Linear]) -> LoraExperts:
        bytes_each = weights.nbytes / sum(each.out_features * each.in_features for each in by_half.values())
        own = {
            place: (linear.name, ops.prepare_lora(*self._shape(linear, bytes_each, of_expert=True)))
            for place, linear in by_half.items()
        }
        self.slots |= dict(own.values())
        return LoraExperts(weights, own, self.changed)

    def _shape(
        self, linear: Linear, bytes_each: float, *, of_expert: bool = False
    ) -> tuple[ops.LoraShape, torch.dtype, torch.device]:
        """Return (shape, dtype, device) of the slots of `linear`. `bytes_each`: bytes per number of the layer's weight. Adapters
        are stored in at most as many bits, but at least 8."""
        size, room = (linear.out_features, linear.in_features), self._room
        shape = ops.LoraShape(
            *size,
            linear.parts or size[:1],
            room.num_slots,
            room.max_rank,
            8 if bytes_each < 1.5 else 16 if bytes_each < 3 else 32,
            of_expert,
        )
        return shape, torch.float32 if linear.float32 else self._dtype, self._device


def _bytes_each(weight: ops.LinearWeight) -> float:
    return weight.nbytes / (weight.out_features * weight.in_features)


def _own(spec: DecoderSpec) -> dict[str, Cut]:
    """Return the slices of split layers that the shard `spec` contains, by the layer names that adapters use."""
    found = {name.removesuffix(".weight"): cut for name, cut in cuts(spec).items() if name.endswith(".weight")}
    if (table := found.get(EMBEDDING)) is not None:
        found.setdefault(HEAD, table)
        size = embedding_linear(spec).out_features
        found[EMBEDDING] = Cut(table.shape[::-1], (Span(0, size),), table.rows[0])
    return found


def _share(part: ops.LoraPart, cut: Cut) -> ops.LoraPart | None:
    """Return the part of an adapter for a slice `cut` of a layer: rows of B and columns of A. None if it does not change the
    slice."""
    held = torch.cat([torch.arange(*span) for span in cut.rows])
    within = ((held >= part.start) & (held < part.start + len(part.b))).nonzero().flatten()
    if not len(within):
        return None
    a = part.a if cut.columns is None else part.a[:, slice(*cut.columns)].contiguous()
    return ops.LoraPart(int(within[0]), a, part.b[held[within] - part.start], part.scale)
