"""A stack of layers, one after the other; on the CPU, once its memory is known, as few native calls.

Consecutive layers whose every op can be recorded are one call; any other runs as it is described, between such calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

import ops
from runtime.models.blocks.attention import LayerMemory
from runtime.models.blocks.layer import LayerBlock
from runtime.models.blocks.mixer import LayerStep

log = logging.getLogger("oneloop.models")


class StackedLayer(NamedTuple):
    """`memory`: which entries of the stack's are its own."""

    block: LayerBlock
    memory: slice


class LayerStack:
    """`layers`: each with the number of its mixers. `keeps_embedding`: some of them ask for what the stream began with."""

    def __init__(self, layers: Sequence[tuple[LayerBlock, int]], *, keeps_embedding: bool) -> None:
        self._keeps_embedding = keeps_embedding
        ends = accumulate(count for _, count in layers)
        self._layers = [
            StackedLayer(block, slice(end - count, end)) for (block, count), end in zip(layers, ends, strict=True)
        ]
        # In their order: recordings of neighbouring layers, and indices of layers that have none.
        self._parts: Sequence[ops.Recording | int] = range(len(self._layers))

    def forward(
        self, residual: Tensor, positions: Tensor, memory: Sequence[LayerMemory], slots: Sequence[Tensor],
        metas: Sequence[ops.AttentionMeta],
    ) -> Tensor | None:  # fmt: skip
        """residual [T, H], changed in place; memory: one entry for each mixer, whose `table` picks from slots and metas -> what
        the last layer adds, [T, H], if anything."""
        x, step = None, LayerStep(positions, slots, metas, residual.clone() if self._keeps_embedding else None)
        for part in self._parts:
            if isinstance(part, int):
                block, own = self._layers[part]
                x = block.forward(x, residual, memory[own], step)
            else:
                x = part.run(x, residual, positions, slots, metas)
        return x

    def recorded(self, memory: Sequence[LayerMemory], hidden_size: int) -> LayerStack:
        """The same for this memory alone."""
        parts: list[ops.Recording | int] = []
        recorder: ops.Recorder | None = None
        num_tables = 1 + max((layer.table for layer in memory), default=0)
        for index, (block, own) in enumerate(self._layers):
            fresh = recorder or ops.Recorder(hidden_size, num_tables, after=index > 0)
            try:
                fresh.add(_call(block, memory[own]))
            except ops.NotRecordable as reason:
                log.debug("layer %d is not recorded: %s", index, reason)
                parts.extend([] if recorder is None else [recorder.finish()])
                parts.append(index)
                recorder = None
            else:
                recorder = fresh
        parts.extend([] if recorder is None else [recorder.finish()])
        stack = copy(self)
        stack._parts = parts
        return stack


def _call(block: LayerBlock, memory: Sequence[LayerMemory]) -> Callable[[Tensor | None, ops.StepSymbols], Tensor]:
    def run(x: Tensor | None, step: ops.StepSymbols) -> Tensor:
        # Nothing that the embedding is for can be recorded: any symbol will do.
        return block.forward(x, step.residual, memory, LayerStep(step.positions, step.slots, step.metas, step.residual))

    return run
