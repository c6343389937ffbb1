"""ForwardStep: the tensors of one step that a model reads. It has no requests, no sampler and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV


class DeepstackStep(NamedTuple):
    """Vectors added to the outputs of the first layers: for layer l `features[l]`, at `tokens`. tokens [N] int64, features
    [L, N, H]."""

    tokens: Tensor
    features: Tensor


class CrossStep(NamedTuple):
    """Encoder outputs whose keys and values cross-attention stores in this step: outputs [N, E, W], for the block-table
    entries `rows` [N] int64 of the attention metadata."""

    outputs: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """T tokens of R rows; tokens of a row are contiguous. Contains all step data that blocks may need: a new fact is a new
    field here.

    input_ids [T] int64. positions [T] int64. slot_mapping: for each block table, int64 [T], the token's slot in the KV cache,
    -1 for none; for a table of recurrent states, [R], the slot of each row's state. attn_metadata: attention metadata of each
    block table. kv_caches: one entry for each cache in the model's spec, in order.

    token_type_ids [T] int64: token types, None if all are 0. input_embeds [T, H], the model's dtype: replaces the embeddings of
    input_ids; already scaled, without learned positions; not modified.

    adapters [T] int32: adapter slot of each token, -1 for none; None: no token has an adapter. token_adapters: the same, as
    prepared by the model for its layers.

    rope_positions: rotary positions if they differ from `positions`; [T] int64, or [3, T] for embeddings of three axes, with
    rope_table [T, D_rot] float32, each token's cosines and sines. deepstack: vectors added to the outputs of the first layers.
    blocks: spans of tokens that attend to each other regardless of the layers' masks. cross: encoder outputs whose keys and
    values layers store from this step on.

    hidden_states [T, H]: input of a draft head, from the model or from the head's last round; None for a model."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Sequence[Tensor]
    attn_metadata: Sequence[ops.AttentionMeta]
    kv_caches: Sequence[LayerKV]
    input_embeds: Tensor | None = None
    token_type_ids: Tensor | None = None
    adapters: Tensor | None = None
    rope_positions: Tensor | None = None
    rope_table: Tensor | None = None
    deepstack: DeepstackStep | None = None
    blocks: Sequence[ops.TokenBlock] = ()
    cross: CrossStep | None = None
    hidden_states: Tensor | None = None
    token_adapters: ops.TokenAdapters | None = None

    def linear(self, x: Tensor | ops.RoundedRows, weight: ops.LinearWeight) -> Tensor:
        """Return `ops.linear` of all tokens of the step, with their adapters."""
        return ops.linear(x, weight.of(self.token_adapters))

    @property
    def rotated_at(self) -> Tensor:
        """Rotary positions of the tokens, [T] int64 or [3, T]."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def is_plain(self) -> bool:
        """True if the step has only what traced layers support: ids or embeddings, each at one position."""
        return self.deepstack is None and self.cross is None and not self.blocks and self.rotated_at.ndim == 1

    def cache(self, index: int) -> tuple[tuple[Tensor, ...], Tensor, ops.AttentionMeta]:
        """Return the tensors of `kv_caches[index]`, with slot mapping and metadata of their block table."""
        kv = self.kv_caches[index]
        return kv.tensors, self.slot_mapping[kv.table], self.attn_metadata[kv.table]
