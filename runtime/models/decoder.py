"""The decoder, written once: computes whatever model its DecoderSpec describes, one step of mixed rows at a time.

Plain objects around `ops` calls, no nn.Module: a layer is about ten calls, and what surrounds them is felt at one token a
step. Knows tokens, positions and slots; neither requests nor where its weights came from."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

import ops
from runtime.models.blocks.attention import LayerMemory
from runtime.models.blocks.layer import build_layer
from runtime.models.blocks.rope import cos_sin_table
from runtime.models.blocks.stack import LayerStack
from runtime.models.blocks.vocabulary import VocabularyBlock
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import DecoderSpec, layer_name
from runtime.models.spec.layer import HybridLayer


class Hidden(NamedTuple):
    """What the last layer adds, x [T, H] or None where it has added it, and what it adds it to, residual [T, H]."""

    x: Tensor | None
    residual: Tensor


class Decoder:
    """`dtype`: of weights and activations, by torch's name. `device`: where they are, "cpu" or "cuda". `max_positions`: the
    longest context it will be asked for."""

    uncapturable: str | None = None

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        dtype: str,
        device: str,
        max_positions: int,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.num_parameters = sum(prod(parameter.shape) for parameter in spec.parameters())
        self.weights_bytes = sum(each.nbytes for kind in weights for each in kind.values())
        self._vocabulary = VocabularyBlock(spec, weights, dtype)
        tables = {
            rope: cos_sin_table(rope, max_positions).to(device)
            for rope in {attention.rope for attention in spec.attentions()}
        }
        self._stack = LayerStack(
            [
                (build_layer(layer, layer_name(index), spec.hidden_size, weights, tables), len(layer.mixers))
                for index, layer in enumerate(spec.layers)
            ],
            keeps_embedding=any(isinstance(layer, HybridLayer) for layer in spec.layers),
        )

    def recorded(self, memory: Sequence[LayerMemory]) -> Decoder:
        """The same for this memory alone: a native CPU step of its layers is as few calls as `ops.Recorder` allows."""
        if not ops.can_record(torch.device(self.device), getattr(torch, self.dtype)):
            return self
        decoder = copy(self)
        decoder._stack = self._stack.recorded(memory, self.spec.hidden_size)
        return decoder

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        memory: Sequence[LayerMemory],
        slots: Sequence[Tensor],
        metas: Sequence[ops.AttentionMeta],
    ) -> Hidden:
        """`memory`: one entry for each of `spec.kv_shapes()`. The tokens' keys and values are written to the `slots` [T] int64 of
        its block table, then attended to through its entry of `metas`."""
        residual = self._vocabulary.embed(input_ids, positions)
        return Hidden(self._stack.forward(residual, positions, memory, slots, metas), residual)

    def logits(self, hidden: Hidden, tokens: Tensor | None = None) -> Tensor:
        """`tokens` [S] int64: those whose logits [S, V] are wanted. None: of all, and `hidden` is overwritten."""
        x, residual = hidden
        if tokens is not None:
            x, residual = None if x is None else x[tokens], residual[tokens]
        return self._vocabulary.logits(x, residual)
