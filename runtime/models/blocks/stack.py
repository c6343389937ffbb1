"""A stack of layers, one after the other; on the CPU, once its memory is known, as few native calls.

Consecutive layers whose every op can be recorded are one call; any other runs as it is described, between such calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

import ops
from runtime.models.blocks.attention import LayerMemory
from runtime.models.blocks.layer import LayerBlock

log = logging.getLogger("oneloop.models")


class Stack(Protocol):
    def forward(
        self, residual: Tensor, positions: Tensor, memory: Sequence[LayerMemory], slots: Sequence[Tensor],
        metas: Sequence[ops.AttentionMeta],
    ) -> Tensor | None:  # fmt: skip
        """residual [T, H], changed in place; memory: one entry a layer, whose `table` picks from slots and metas -> what the
        last layer adds, [T, H], if anything."""
        ...


class LayerStack:
    def __init__(self, layers: Sequence[LayerBlock]) -> None:
        self._layers = layers

    def forward(
        self, residual: Tensor, positions: Tensor, memory: Sequence[LayerMemory], slots: Sequence[Tensor],
        metas: Sequence[ops.AttentionMeta],
    ) -> Tensor | None:  # fmt: skip
        x: Tensor | None = None
        for layer, layer_memory in zip(self._layers, memory, strict=True):
            table = layer_memory.table
            x = layer.forward(x, residual, positions, layer_memory, slots[table], metas[table])
        return x

    def recorded(self, memory: Sequence[LayerMemory], hidden_size: int) -> RecordedStack:
        """The same for this memory alone."""
        parts: list[ops.Recording | int] = []
        recorder: ops.Recorder | None = None
        num_tables = 1 + max((layer.table for layer in memory), default=0)
        for index, (layer, layer_memory) in enumerate(zip(self._layers, memory, strict=True)):
            fresh = recorder or ops.Recorder(hidden_size, num_tables, after=index > 0)
            try:
                fresh.add(_call(layer, layer_memory))
            except ops.NotRecordable as reason:
                log.debug("layer %d is not recorded: %s", index, reason)
                parts.extend([] if recorder is None else [recorder.finish()])
                parts.append(index)
                recorder = None
            else:
                recorder = fresh
        parts.extend([] if recorder is None else [recorder.finish()])
        return RecordedStack(self._layers, parts)


def _call(layer: LayerBlock, memory: LayerMemory) -> Callable[[Tensor | None, ops.StepSymbols], Tensor]:
    table = memory.table
    return lambda x, step: layer.forward(x, step.residual, step.positions, memory, step.slots[table], step.metas[table])


class RecordedStack:
    """`parts`: recordings of neighbouring layers, and indices of layers that have none."""

    def __init__(self, layers: Sequence[LayerBlock], parts: Sequence[ops.Recording | int]) -> None:
        self._layers, self._parts = layers, parts

    def forward(
        self, residual: Tensor, positions: Tensor, memory: Sequence[LayerMemory], slots: Sequence[Tensor],
        metas: Sequence[ops.AttentionMeta],
    ) -> Tensor | None:  # fmt: skip
        x: Tensor | None = None
        for part in self._parts:
            if isinstance(part, int):
                table = memory[part].table
                x = self._layers[part].forward(x, residual, positions, memory[part], slots[table], metas[table])
            else:
                x = part.run(x, residual, positions, slots, metas)
        return x
