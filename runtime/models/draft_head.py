"""DraftHead: computes the layers of a DraftHeadSpec. It may use the embedding and output head of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.blocks.norm import build_norm
from runtime.models.blocks.stack import LayerStack
from runtime.models.blocks.vocabulary import VocabularyBlock
from runtime.models.blocks.weights import Weights
from runtime.models.decoder import Decoder, Hidden, build_stack, rope_tables
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.draft_head import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    PROJECTION,
    TOKEN_OFFSETS,
    DraftHeadSpec,
    JoinedEntry,
)
from runtime.weights.rules import WeightsError


class EntryBlock(Protocol):
    """Input block of a draft head: combines token embeddings and hidden states for the first layer."""

    def read(self, hidden_states: Tensor) -> Tensor:
        """Convert the model's hidden states [T, *] to [T, H], the width of the head's own hidden states."""
        ...

    def forward(self, embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Combine embeddings and hidden states, both [T, H], into a new tensor [T, H]."""
        ...


class JoinedEntryBlock:
    def __init__(self, entry: JoinedEntry, weights: Weights) -> None:
        self._embedding_norm = build_norm(entry.norm, EMBEDDING_NORM, weights)
        self._hidden_norm = build_norm(entry.norm, HIDDEN_NORM, weights)
        self._projection = weights.linears[PROJECTION]
        self._hidden_first = entry.hidden_first

    def read(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def forward(self, embeds: Tensor, hidden_states: Tensor) -> Tensor:
        parts = [self._embedding_norm.forward(embeds), self._hidden_norm.forward(hidden_states)]
        return ops.linear(torch.cat(parts[::-1] if self._hidden_first else parts, dim=1), self._projection)


class FusedEntryBlock:
    def __init__(self, weights: Weights) -> None:
        self._projection = weights.linears[PROJECTION]

    def read(self, hidden_states: Tensor) -> Tensor:
        return ops.linear(hidden_states, self._projection)

    def forward(self, embeds: Tensor, hidden_states: Tensor) -> Tensor:
        return hidden_states.clone()


def _entry(spec: DraftHeadSpec, weights: Weights) -> EntryBlock:
    return JoinedEntryBlock(spec.entry, weights) if isinstance(spec.entry, JoinedEntry) else FusedEntryBlock(weights)


def _token_ids(spec: DraftHeadSpec, weights: Weights) -> Tensor | None:
    """Return the model's token ids of the draft vocabulary [draft_vocab_size] int64; None if both vocabularies are equal. Raises
    WeightsError if the ids are invalid."""
    if spec.draft_vocab_size is None:
        return None
    offsets = weights.tensors[TOKEN_OFFSETS]
    ids = torch.arange(len(offsets), device=offsets.device) + offsets.round().long()
    if len(ids) != len(set(ids.tolist())) or not 0 <= int(ids.min()) <= int(ids.max()) < spec.vocab_size:
        raise WeightsError(
            f"{TOKEN_OFFSETS} does not name {len(ids)} different ones of the model's {spec.vocab_size} tokens"
        )
    return ids


class DraftHead:
    """Draft head of `model`. It reads the model's hidden states, and uses its embedding and output head unless it has its own."""

    def __init__(
        self, spec: DraftHeadSpec, entry: EntryBlock, token_ids: Tensor | None, stack: LayerStack,
        vocabulary: VocabularyBlock, weights_bytes: int, model: Decoder,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.dtype = model.dtype
        self.device = model.device
        self.num_parameters = spec.num_parameters
        self.weights_bytes = weights_bytes
        self._model = model
        self._entry = entry
        self._token_ids = token_ids
        self._stack = stack
        self._vocabulary = vocabulary

    may_refuse_capture = False
    graph_unsupported_reason = None

    @classmethod
    def build(cls, spec: DraftHeadSpec, weights: Weights, model: Decoder, *, max_positions: int) -> DraftHead:
        """Build a draft head. `max_positions`: longest context in tokens."""
        head = None if spec.own_head else spec.head.name
        whole = model.vocabulary.lend(weights, table=not spec.own_embedding, head=head)
        return cls(
            spec,
            _entry(spec, weights),
            _token_ids(spec, weights),
            build_stack(spec, weights, rope_tables(spec, device=model.device, max_positions=max_positions)),
            VocabularyBlock(spec, whole, model.dtype),
            weights.nbytes,
            model,
        )

    def traced(self, kv_caches: Sequence[LayerKV]) -> DraftHead:
        return self

    @property
    def hidden_size(self) -> int:
        """Size of the vectors that `forward` returns."""
        return self.spec.hidden_size

    def keep(self, hidden: Hidden) -> Hidden:
        """Return the part of the model's hidden states that `read` needs. Computing logits does not change it."""
        return self._model.kept_for_head(hidden)

    def read(self, kept: Hidden) -> Tensor:
        """Return the head's input [T, H] for a result of `keep`, which is overwritten."""
        return self._entry.read(self._model.read_by_head(kept))

    def forward(self, step: ForwardStep) -> Tensor:
        """Return the head's hidden states [T, H]. `input_ids` of the step are each position's next token. Logits, and the input of
        the next draft token, are computed from the result."""
        assert step.hidden_states is not None
        embeds = self._vocabulary.embed(step.input_ids)
        residual = self._entry.forward(embeds, step.hidden_states)
        x = self._stack.forward(residual, replace(step, input_embeds=embeds)).x
        if self.spec.hands_on_normed:
            return self._vocabulary.final_hidden(x, residual)
        return residual if x is None else residual.add_(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [S, V] from `forward`'s result [S, H]."""
        if not self.spec.hands_on_normed:
            hidden = self._vocabulary.final_hidden(None, hidden)
        logits = self._vocabulary.logits(hidden)
        if self._token_ids is None:
            return logits
        of_all = logits.new_full((len(logits), self.spec.vocab_size), -torch.inf)
        return of_all.index_copy_(1, self._token_ids, logits)
