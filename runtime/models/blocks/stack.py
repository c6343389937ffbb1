"""Stack of consecutive layers. On a CPU, layers that can be traced are computed in as few native calls as possible.

Consecutive layers whose ops can all be traced become one native call. Other layers run normally between such calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.blocks.layer import LayerBlock
from runtime.models.blocks.parameters import Parameters
from runtime.models.forward_step import ForwardStep

log = logging.getLogger("oneloop.models")

Part = LayerBlock | ops.CompiledStack  # a layer, or neighbouring ones compiled


class StackOutput(NamedTuple):
    """Output of a stack. `x` [T, H]: output of the last layer, not yet added to the residual; None if it is added. `aux`:
    residual stream [T, H] at the input of each layer in `aux_layers`."""

    x: Tensor | None
    aux: tuple[Tensor, ...] = ()


class LayerStack:
    """Layers in order. `keeps_embedding`: some layer reads the initial residual stream. `aux_layers`: indices of layers whose
    inputs are also returned. `parts`: traced or single layers to run, each with the index of its first layer; None: every layer
    separately. `continues`: the layers follow those of another pipeline stage."""

    def __init__(
        self, layers: Sequence[LayerBlock], *, keeps_embedding: bool, aux_layers: Sequence[int] = (),
        parts: Sequence[tuple[int, Part]] | None = None, continues: bool = False,
    ) -> None:  # fmt: skip
        self._layers = layers
        self._keeps_embedding = keeps_embedding
        self._aux_layers = aux_layers
        self._parts = list(enumerate(layers)) if parts is None else parts
        self._continues = continues

    def forward(self, residual: Tensor, step: ForwardStep, x: Tensor | None = None) -> StackOutput:
        """Compute all layers. `residual` [T, H] is changed in place. x [T, H]: output of the previous pipeline stage's last
        layer, which is still to be added to `residual`; None if there is no previous stage."""
        aux = []
        parts = self._parts if step.is_plain else list(enumerate(self._layers))  # what is compiled knows no more
        deep = () if step.deepstack is None else step.deepstack.features
        if self._keeps_embedding:
            step = replace(step, input_embeds=residual.clone())
        for index, part in parts:
            if index in self._aux_layers:
                aux.append(_sum(x, residual))
            if isinstance(part, ops.CompiledStack):
                x = part.run(x, residual, step.rotated_at, step.slot_mapping, step.attn_metadata, step.adapters)
            else:
                x = part.forward(x, residual, step)
            if step.deepstack is not None and index < len(deep):
                residual[step.deepstack.tokens] += deep[index]
        if len(self._layers) in self._aux_layers:
            aux.append(_sum(x, residual))
        return StackOutput(x, tuple(aux))

    def traced(self, kv_caches: Sequence[LayerKV], hidden_size: int) -> LayerStack:
        """Return this stack bound to `kv_caches`, with consecutive traceable layers merged into one traced part."""
        parts: list[tuple[int, Part]] = []
        tracer: ops.Tracer | None = None
        first = 0  # of those in `tracer`
        num_tables = 1 + max((kv.table for kv in kv_caches), default=0)
        for index, block in enumerate(self._layers):
            if tracer is not None and index in self._aux_layers:
                parts.append((first, tracer.finish()))
                tracer = None
            fresh = tracer or ops.Tracer(hidden_size, num_tables, after=index > 0 or self._continues)
            try:
                fresh.add(_call(block, kv_caches))
            except ops.NotTraceable as reason:
                log.debug("layer %d is not traced: %s", index, reason)
                parts.extend([] if tracer is None else [(first, tracer.finish())])
                parts.append((index, block))
                tracer = None
            else:
                first = index if tracer is None else first
                tracer = fresh
        parts.extend([] if tracer is None else [(first, tracer.finish())])
        return LayerStack(
            self._layers, keeps_embedding=self._keeps_embedding, aux_layers=self._aux_layers, parts=parts,
            continues=self._continues,
        )  # fmt: skip


def _sum(x: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x as a new tensor, because the residual is changed in place later."""
    return residual.clone() if x is None else residual + x


class TracedStack:
    """Layer stack that is traced for its KV caches at first use, and again after weights have moved."""

    def __init__(
        self, stack: LayerStack, kv_caches: Sequence[LayerKV], hidden_size: int, parameters: Parameters
    ) -> None:
        self._stack, self._kv_caches, self._hidden_size = stack, kv_caches, hidden_size
        self._traced: LayerStack | None = stack.traced(kv_caches, hidden_size)
        parameters.trace_holders.add(self)

    def forget(self) -> None:
        self._traced = None

    def forward(self, residual: Tensor, step: ForwardStep, x: Tensor | None = None) -> StackOutput:
        if self._traced is None:
            self._traced = self._stack.traced(self._kv_caches, self._hidden_size)
        return self._traced.forward(residual, step, x)


def _call(block: LayerBlock, kv_caches: Sequence[LayerKV]) -> Callable[[Tensor | None, ops.StepSymbols], Tensor]:
    def run(x: Tensor | None, symbols: ops.StepSymbols) -> Tensor:
        # Nothing that embeddings are for can be traced: any symbol will do.
        step = ForwardStep(
            symbols.input_ids,
            symbols.positions,
            symbols.slot_mapping,
            symbols.attn_metadata,
            kv_caches,
            symbols.residual,
        )
        return block.forward(x, symbols.residual, step)

    return run
