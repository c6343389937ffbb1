"""A stack of layers, one after the other; on the CPU, once their caches are known, as few native calls.

Consecutive layers whose every op can be traced are one call; any other runs as it is described, between such calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.blocks.layer import LayerBlock
from runtime.models.blocks.parameters import Parameters
from runtime.models.forward_step import ForwardStep

log = logging.getLogger("oneloop.models")

Part = LayerBlock | ops.CompiledStack  # a layer, or neighbouring ones compiled


class LayerStack:
    """`keeps_embedding`: some layer asks for what the residual stream began with. `parts`: the layers as they run, in their
    order; None: each by itself."""

    def __init__(
        self, layers: Sequence[LayerBlock], *, keeps_embedding: bool, parts: Sequence[Part] | None = None
    ) -> None:
        self._layers = layers
        self._keeps_embedding = keeps_embedding
        self._parts = layers if parts is None else parts

    def forward(self, residual: Tensor, step: ForwardStep) -> Tensor | None:
        """residual [T, H], changed in place -> what the last layer adds, [T, H], if anything."""
        if not step.is_plain:
            return self.forward_each(residual, step)
        x = None
        if self._keeps_embedding:
            step = replace(step, input_embeds=residual.clone())
        for part in self._parts:
            if isinstance(part, ops.CompiledStack):
                x = part.run(x, residual, step.rotated_at, step.slot_mapping, step.attn_metadata, step.adapters)
            else:
                x = part.forward(x, residual, step)
        return x

    def forward_each(self, residual: Tensor, step: ForwardStep) -> Tensor | None:
        """`forward`, layer by layer, whatever the step brings."""
        x, num_deep = None, 0 if step.deepstack is None else len(step.deepstack.features)
        if self._keeps_embedding:
            step = replace(step, input_embeds=residual.clone())
        for index, layer in enumerate(self._layers):
            x = layer.forward(x, residual, step)
            if step.deepstack is not None and index < num_deep:
                residual[step.deepstack.tokens] += step.deepstack.features[index]
        return x

    def traced(self, kv_caches: Sequence[LayerKV], hidden_size: int) -> LayerStack:
        """The same for these caches alone."""
        parts: list[Part] = []
        tracer: ops.Tracer | None = None
        num_tables = 1 + max((kv.table for kv in kv_caches), default=0)
        for index, block in enumerate(self._layers):
            fresh = tracer or ops.Tracer(hidden_size, num_tables, after=index > 0)
            try:
                fresh.add(_call(block, kv_caches))
            except ops.NotTraceable as reason:
                log.debug("layer %d is not traced: %s", index, reason)
                parts.extend([] if tracer is None else [tracer.finish()])
                parts.append(block)
                tracer = None
            else:
                tracer = fresh
        parts.extend([] if tracer is None else [tracer.finish()])
        return LayerStack(self._layers, keeps_embedding=self._keeps_embedding, parts=parts)


class TracedStack:
    """A stack for these caches alone, traced, and traced anew once weights have moved."""

    def __init__(
        self, stack: LayerStack, kv_caches: Sequence[LayerKV], hidden_size: int, parameters: Parameters
    ) -> None:
        self._stack, self._kv_caches, self._hidden_size = stack, kv_caches, hidden_size
        self._traced: LayerStack | None = stack.traced(kv_caches, hidden_size)
        parameters.trace_holders.add(self)

    def forget(self) -> None:
        self._traced = None

    def forward(self, residual: Tensor, step: ForwardStep) -> Tensor | None:
        """See `LayerStack`."""
        if self._traced is None:
            self._traced = self._stack.traced(self._kv_caches, self._hidden_size)
        return self._traced.forward(residual, step)


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
