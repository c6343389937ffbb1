"""ForwardStep: one step as a model reads it. Tensors of mixed rows only; it knows no request, no sampler and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV


class DeepstackStep(NamedTuple):
    """Addition to the outputs of layers: for layer l the rows `features[l]` at `tokens`. tokens [N] int64, features [L, N,
    H]."""

    tokens: Tensor
    features: Tensor


class CrossStep(NamedTuple):
    """Outputs of encoders for rows that have just begun, whose keys and values cross-attention keeps: outputs [N, E, W], the
    entries `rows` [N] int64 of the block tables as metadata has them."""

    outputs: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """T tokens of R rows, a row's tokens side by side. Whatever a block may want of a step is here: a new fact is a field, and
    no signature changes.

    input_ids [T] int64. positions [T] int64. slot_mapping: for each block table, int64, where the step's tokens go in the KV
    cache, [T], -1 for nowhere; of a table of recurrent states, where each row's state is, [R]. attn_metadata: for each block
    table, what attention needs. kv_caches: one entry for each that the model's spec tells of, in its order.

    token_type_ids [T] int64: which kind each token is of, None where all are of kind 0. input_embeds [T, H], of the model's dtype,
    in place of the embeddings of input_ids: scaled already, learned positions still to be added; left as it is.

    adapters [T] int32: the slot of each token's adapter, -1 for none; None: no token has one. token_adapters: the same as layers
    read it, once the model has prepared it.

    rope_positions: where tokens stand for rotary embeddings, if that is not `positions`; [T] int64, or [3, T] for embeddings of
    three axes, with rope_table [T, D_rot] float32: each token's own cosines and sines. deepstack: what the first layers add beside
    their own. blocks: tokens that see each other all, whatever the layers' masks say. cross: outputs of encoders whose keys and
    values layers keep from this step on.

    hidden_states [T, H]: what a draft head is given of the model, or of itself, beside the token that stands behind; None for a
    model."""

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
        """Rotary positions, [T] int64 or [3, T]."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def is_plain(self) -> bool:
        """True if the step has only what traced layers support: ids or embeddings, each at one position."""
        return self.deepstack is None and self.cross is None and not self.blocks and self.rotated_at.ndim == 1

    def cache(self, index: int) -> tuple[tuple[Tensor, ...], Tensor, ops.AttentionMeta]:
        """The tensors of `kv_caches[index]`, and of the block table that tells where in them: slot mapping and metadata."""
        kv = self.kv_caches[index]
        return kv.tensors, self.slot_mapping[kv.table], self.attn_metadata[kv.table]
