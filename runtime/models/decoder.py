"""Decoder: computes one step of the model that a DecoderSpec describes. Rows of a step may be prompts and decodes.

It consists of plain objects around `ops` calls instead of nn.Modules. A layer is about ten calls, and more overhead would be
noticeable at one token per step. The decoder knows tokens, positions and slots, but no requests and no checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.adapters import ModelAdapters
from runtime.models.blocks.layer import build_layer
from runtime.models.blocks.mixer import Tables
from runtime.models.blocks.parameters import Parameters
from runtime.models.blocks.pooler import PoolerBlock
from runtime.models.blocks.rope import RopeAxes, cos_sin_table
from runtime.models.blocks.stack import LayerStack, TracedStack
from runtime.models.blocks.vocabulary import VocabularyBlock
from runtime.models.blocks.weights import Weights
from runtime.models.forward_step import ForwardStep
from runtime.models.model import Encoder
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.stages import keeps_embedding
from runtime.parallel.stages import StageIO


class Hidden(NamedTuple):
    """Output of the layers. `x` [T, H]: output of the last layer, not yet added to `residual` [T, H]; None if it is added. `aux`:
    inputs [T, H] of the layers in the spec's `aux_layers`. adapters [T] int32: adapter slots for the head, as in `ForwardStep`."""

    x: Tensor | None
    residual: Tensor
    aux: tuple[Tensor, ...] = ()
    adapters: Tensor | None = None

    def of(self, tokens: Tensor | slice) -> Hidden:
        """Return the hidden states of `tokens` only, without aux and adapters. Indices [S] int64 yield a copy, a slice yields a
        view."""
        if isinstance(tokens, slice) and tokens == slice(0, len(self.residual)):
            return Hidden(self.x, self.residual)
        return Hidden(None if self.x is None else self.x[tokens], self.residual[tokens])


class Decoder:
    """Decoder described by a spec. `dtype`: dtype of weights and activations, by torch's name. `device`: "cpu" or "cuda"."""

    def __init__(
        self, spec: DecoderSpec, vocabulary: VocabularyBlock, stack: LayerStack, parameters: Parameters, pooler: PoolerBlock,
        *, dtype: str, device: str, num_parameters: int, weights_bytes: int, traced: TracedStack | None = None,
        adapters: ModelAdapters | None = None, encoder: Encoder | None = None, axes: RopeAxes | None = None,
        stage: StageIO | None = None, expert_counts: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Create a decoder. `traced`: replacement of `stack` with fewer native calls. `adapters`: adapter slots, if any. `axes`:
        M-RoPE embedding, if any. `stage`: transfers hidden states, if `spec` is a pipeline stage. `expert_counts`: see
        `Weights.counts`."""
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.num_parameters = num_parameters
        self.weights_bytes = weights_bytes
        self._vocabulary = vocabulary
        self._layers = stack
        self._stack = stack if traced is None else traced
        self._parameters = parameters
        self.pooler = pooler
        self.adapters = adapters
        self.encoder = encoder
        self._axes = axes
        self._stage = stage
        self.expert_counts = expert_counts

    may_refuse_capture = False
    graph_unsupported_reason = None

    @classmethod
    def build(
        cls, spec: DecoderSpec, weights: Weights, *, dtype: str, device: str, max_positions: int,
        adapters: ModelAdapters | None = None, stage: StageIO | None = None,
    ) -> Decoder:  # fmt: skip
        """Create a decoder. `weights`: weights with the names in `spec`. `max_positions`: longest context in tokens. `adapters`:
        manager of the adapter slots in `weights`."""
        tables = rope_tables(spec, device=device, max_positions=max_positions)
        return cls(
            spec,
            VocabularyBlock(spec, weights, dtype),
            build_stack(spec, weights, tables),
            Parameters(spec, weights),
            PoolerBlock(spec.pooler, weights, getattr(torch, dtype)),
            dtype=dtype,
            device=device,
            num_parameters=sum(prod(parameter.shape) for parameter in spec.whole.parameters()),
            weights_bytes=weights.nbytes,
            adapters=adapters,
            axes=RopeAxes.of(tables),
            stage=stage,
            expert_counts=weights.counts,
        )

    def traced(self, kv_caches: Sequence[LayerKV]) -> Decoder:
        """Return this decoder bound to `kv_caches`, with its layers traced into few native CPU calls. Return itself if tracing is
        unsupported."""
        if not ops.can_trace(torch.device(self.device), getattr(torch, self.dtype)):
            return self
        return Decoder(
            self.spec, self._vocabulary, self._layers, self._parameters, self.pooler, dtype=self.dtype, device=self.device,
            num_parameters=self.num_parameters, weights_bytes=self.weights_bytes,
            traced=TracedStack(self._layers, kv_caches, self.spec.hidden_size, self._parameters), adapters=self.adapters,
            encoder=self.encoder, axes=self._axes, stage=self._stage, expert_counts=self.expert_counts,
        )  # fmt: skip

    def load_parameter(self, name: str, stored: ops.Stored) -> None:
        """Replace the values of parameter `name`, from the next step on. `stored`: a matrix may include its bias. No step may be in
        flight. Raises WeightsError if the model has no parameter `name`, or if shape or format differ."""
        self._parameters.load(name, stored)

    def embed(self, input_ids: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return the embeddings [T, H] of input_ids [T] int64 for `ForwardStep.input_embeds`. The caller may replace some of them,
        for example by image embeddings. `adapters`: see `ForwardStep`."""
        return self._vocabulary.embed(input_ids, self._of_tokens(adapters))

    def forward(self, step: ForwardStep) -> Hidden:
        """Compute one step up to the last layer. Keys and values of its tokens are written to the step's slots before attention
        reads them. A pipeline stage other than the last sends its output to the next stage, and the return value is meaningless."""
        if self._axes is not None and step.rope_positions is not None and step.rope_positions.ndim > 1:
            step = self._axes.rotated(step)
        if self._stage is not None:
            return self._forward_of_stage(step, self._stage)
        if step.adapters is not None:
            step = replace(step, token_adapters=self._of_tokens(step.adapters))
        residual = self._embedded(step)
        out = self._stack.forward(residual, step)
        of_head = step.adapters if self.adapters is not None and self.adapters.has_vocabulary else None
        return Hidden(out.x, residual, out.aux, of_head)

    def _embedded(self, step: ForwardStep) -> Tensor:
        given, vocabulary = step.input_embeds, self._vocabulary
        x = vocabulary.embed(step.input_ids, step.token_adapters) if given is None else given.clone()
        return self._vocabulary.add_positions(x, step.positions, step.token_type_ids)

    def _forward_of_stage(self, step: ForwardStep, stage: StageIO) -> Hidden:
        """Compute a pipeline stage. Return the tensors for the next stage: the last layer's output, the residual, and the initial
        residual if a layer reads it."""
        delta, embedded = None, []
        if self.spec.embeds:
            residual = self._embedded(step)
            embedded = [residual.clone()] if keeps_embedding(self.spec.all_layers) else []
        else:
            delta, residual, *embedded = stage.incoming(len(step.input_ids))
        if embedded:
            step = replace(step, input_embeds=embedded[0])
        x = self._stack.forward(residual, step, delta).x
        if self.spec.hands_on:
            assert x is not None, "a stage has a layer or more"
            stage.outgoing((x, residual, *embedded))
        return Hidden(x, residual)

    def compute_logits(self, hidden: Hidden, tokens: Tensor | None = None) -> Tensor:
        final = self._final(hidden if tokens is None else hidden.of(tokens))
        slots = hidden.adapters if hidden.adapters is None or tokens is None else hidden.adapters[tokens]
        return self._vocabulary.logits(final, self._of_tokens(slots))

    def _of_tokens(self, slots: Tensor | None) -> ops.TokenAdapters | None:
        return None if self.adapters is None else self.adapters.of_tokens(slots)

    def final_hidden(self, hidden: Hidden, tokens: Tensor | slice) -> Tensor:
        return self._final(hidden.of(tokens))

    def kept_for_head(self, hidden: Hidden) -> Hidden:
        """Return the part of `hidden` that a draft head reads, as tensors that later uses of `hidden` do not change."""
        return hidden if hidden.aux else Hidden(hidden.x, hidden.residual.clone())

    def read_by_head(self, kept: Hidden) -> Tensor:
        """Return a draft head's input for a result of `kept_for_head`. It is the final norm's output [T, H], which overwrites
        `kept`. With `aux_layers`, it is the concatenation of their inputs [T, H * number of layers]."""
        return torch.cat(kept.aux, dim=1) if kept.aux else self._final(kept)

    @property
    def vocabulary(self) -> VocabularyBlock:
        """Embedding and output head, which a draft head may share."""
        return self._vocabulary

    def _final(self, hidden: Hidden) -> Tensor:
        return self._vocabulary.final_hidden(hidden.x, hidden.residual)


def rope_tables(spec: DecoderSpec, *, device: str, max_positions: int) -> Tables:
    """Return the table of cosines and sines of each rotary embedding in the layers."""
    ropes = {attention.rope for attention in spec.attentions()}
    return {rope: cos_sin_table(rope, max_positions).to(device) for rope in ropes}


def build_stack(spec: DecoderSpec, weights: Weights, tables: Tables) -> LayerStack:
    """Create the layers of `spec` with their weights. `tables`: cosines and sines of each rotary embedding."""
    first_caches = accumulate((len(layer.mixers) for layer in spec.layers), initial=0)
    layers = [
        build_layer(layer, name, spec.hidden_size, weights, tables, first_cache)
        for (name, layer), first_cache in zip(spec.named_layers(), first_caches, strict=False)
    ]
    is_stage = spec.stage_of is not None  # a stage's input comes with each step
    return LayerStack(
        layers, keeps_embedding=keeps_embedding(spec) and not is_stage, aux_layers=spec.aux_layers, continues=not spec.embeds
    )  # fmt: skip
