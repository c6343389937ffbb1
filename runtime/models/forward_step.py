"""ForwardStep: all tensors of one step that a model reads. It contains no requests, no sampler and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV


class DeepstackStep(NamedTuple):
    """Vectors that are added to the outputs of the first decoder layers. Layer l adds features[l] [N, H] at `tokens` [N] int64, the
    indices of N tokens of the step."""

    tokens: Tensor
    features: Tensor


class CrossStep(NamedTuple):
    """Encoder outputs whose keys and values cross-attention stores in this step: outputs [N, E, W]. rows [N] int64: index of each
    item's block table in the attention metadata."""

    outputs: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Tensors of a step: T tokens of R rows. Tokens of a row are contiguous. All step data that blocks may need is a field here.

    - input_ids, positions [T] int64
    - slot_mapping: for each block table, each token's slot in the KV cache [T] int64, -1 for none; for a table of recurrent states,
      the slot of each row's state [R]
    - attn_metadata: attention metadata of each block table; kv_caches: one entry for each cache in the model's spec, in order
    - token_type_ids [T] int64: token types, None if all are 0
    - input_embeds [T, H], the model's dtype: replaces the embeddings of input_ids; scaled, without learned positions; unmodified
    - adapters [T] int32: adapter slot of each token, -1 for none; None if no token has an adapter. token_adapters: the same, as
      prepared by the model for its layers
    - rope_positions [T] or [3, T] int64: rotary positions if they differ from `positions`; [3, T] for M-RoPE, with rope_table
      [T, D_rot] float32, the cosines and sines of each token
    - deepstack: vectors added to the outputs of the first layers
    - blocks: spans of tokens that attend to each other regardless of the layers' masks
    - cross: encoder outputs whose keys and values are stored in this step
    - hidden_states [T, H]: input of a draft head, from the model or from the head's last round; None for a model"""

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
        """Return `ops.linear(x, weight)` for all tokens of the step, including their adapters."""
        return ops.linear(x, weight.of(self.token_adapters))

    @property
    def rotated_at(self) -> Tensor:
        """Rotary positions of the tokens, [T] int64 or [3, T]."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def is_plain(self) -> bool:
        """True if traced layers can compute the step: it has only ids or embeddings, and each token has one position."""
        return self.deepstack is None and self.cross is None and not self.blocks and self.rotated_at.ndim == 1

    def cache(self, index: int) -> tuple[tuple[Tensor, ...], Tensor, ops.AttentionMeta]:
        """Return (tensors of `kv_caches[index]`, slot mapping of its block table, attention metadata of its block table)."""
        kv = self.kv_caches[index]
        return kv.tensors, self.slot_mapping[kv.table], self.attn_metadata[kv.table]
