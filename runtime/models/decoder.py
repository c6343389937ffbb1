"""The decoder, written once: computes whatever model its DecoderSpec describes, one step of mixed rows at a time.

Plain objects around `ops` calls, no nn.Module: a layer is about ten calls, and what surrounds them is felt at one token a
step. Knows tokens, positions and slots; neither requests nor where its weights came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

import ops
from runtime.models.blocks.attention import AttentionBlock, LayerKV
from runtime.models.blocks.gated_mlp import GatedMLPBlock
from runtime.models.blocks.rope import cos_sin_table
from runtime.models.blocks.vocabulary import VocabularyBlock
from runtime.models.spec import DecoderSpec, Rope, layer_name


@dataclass(frozen=True, slots=True)
class _LayerBlocks:
    """`next_norm` is the norm before the next layer's attention; the last layer has none."""

    attention: AttentionBlock
    mlp_norm: Tensor
    mlp: GatedMLPBlock
    next_norm: Tensor | None


class Decoder:
    """`linears` and `tensors` hold the weights by the names of `spec.linears()` and `spec.parameters()`.

    `dtype`: of weights and activations, by torch's name. `max_positions`: the longest context it will be asked for."""

    def __init__(
        self,
        spec: DecoderSpec,
        linears: Mapping[str, ops.LinearWeight],
        tensors: Mapping[str, Tensor],
        *,
        dtype: str,
        max_positions: int,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.num_parameters = sum(prod(parameter.shape) for parameter in spec.parameters())
        self.weights_bytes = sum(w.nbytes for w in linears.values()) + sum(t.nbytes for t in tensors.values())
        tables: dict[Rope, Tensor] = {}
        norms = [tensors[f"{layer_name(i)}.input_layernorm.weight"] for i in range(len(spec.layers))]
        self.device = norms[0].device.type
        self._first_norm = norms[0]
        self._norm_eps = spec.norm_eps
        self._vocabulary = VocabularyBlock(spec, linears, tensors)
        self._layers: list[_LayerBlocks] = []
        for index, layer in enumerate(spec.layers):
            rope = layer.attention.rope
            if rope not in tables:
                tables[rope] = cos_sin_table(rope, max_positions).to(norms[0].device)
            self._layers.append(
                _LayerBlocks(
                    AttentionBlock(spec, index, linears, tensors, tables[rope]),
                    tensors[f"{layer_name(index)}.post_attention_layernorm.weight"],
                    GatedMLPBlock(spec, index, linears),
                    norms[index + 1] if index + 1 < len(norms) else None,
                )
            )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: Sequence[LayerKV],
        slots: Tensor,
        meta: ops.AttentionMeta,
        logit_tokens: Tensor | None = None,
    ) -> Tensor:
        """One step: input_ids, positions and slots [T] int64 -> logits [S, V] in the model's dtype.

        `kv`: one entry a layer; the tokens' keys and values are written to `slots`, then attended to through `meta`.
        `logit_tokens` [S] int64: the tokens whose logits are wanted, all where it is None."""
        residual = self._vocabulary.embed(input_ids)
        x = ops.rms_norm(residual, self._first_norm, self._norm_eps)
        eps = self._norm_eps
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x = layer.attention.forward(x, positions, layer_kv, slots, meta)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.mlp.forward(x)
            if layer.next_norm is not None:
                x = ops.add_rms_norm(x, residual, layer.next_norm, eps)
        if logit_tokens is not None:
            x, residual = x[logit_tokens], residual[logit_tokens]
        return self._vocabulary.logits(x, residual)
