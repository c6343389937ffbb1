"""Vocabulary block: maps token ids to embeddings, and hidden states to logits. A tied embedding is stored once."""

from __future__ import annotations

import torch
from torch import Tensor

import ops
from runtime.models.blocks.norm import build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, POSITIONS, TOKEN_TYPES, DecoderSpec


class VocabularyBlock:
    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: str) -> None:
        self._head = weights.linears[spec.head.name] if spec.generates else None
        self._num_logits, self._dtype = spec.vocab_rows, getattr(torch, dtype)
        self._table: Tensor | ops.LinearWeight | None = None
        if spec.has_embedding:
            prepared = weights.linears.get(EMBEDDING)  # the head itself, if they are tied
            self._table = weights.tensors[f"{EMBEDDING}.weight"] if prepared is None else prepared
        # Rounded as the embeddings are, which is how Gemma was trained.
        self._multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=getattr(torch, dtype)))
        self._positions: Tensor | None = None
        if spec.positions is not None:
            self._positions = weights.tensors[f"{POSITIONS}.weight"][spec.positions.offset :]
        self._token_types: Tensor | None = weights.tensors.get(f"{TOKEN_TYPES}.weight")
        self._project_in, self._project_out = (
            None if each is None else weights.linears[each.name] for each in (spec.project_in, spec.project_out)
        )
        self._embedding_norm = (
            None if spec.embedding_norm is None else build_norm(spec.embedding_norm, EMBEDDING_NORM, weights)
        )
        self._norm = None if spec.hands_on else build_norm(spec.norm, FINAL_NORM, weights)
        self._scale, self._softcap = spec.logit_scale, spec.logit_softcap

    def lend(self, weights: Weights, *, table: bool, head: str | None) -> Weights:
        """Return a copy of `weights`, a draft head's weights, to which this model's matrices are added: the embedding if
        `table`, and the output head under the name `head` if that is not None."""
        linears, tensors, own = dict(weights.linears), dict(weights.tensors), self._table
        if table and isinstance(own, Tensor):
            tensors[f"{EMBEDDING}.weight"] = own
        elif table and own is not None and not isinstance(own, Tensor):
            linears[EMBEDDING] = own
        if head is not None and self._head is not None:
            linears[head] = self._head
        return weights._replace(linears=linears, tensors=tensors)

    def embed(self, ids: Tensor, adapters: ops.TokenAdapters | None = None) -> Tensor:
        """Return embeddings [T, H] of ids [T] int64 as a new tensor, without learned positions. `adapters`: LoRA adapters of the
        tokens."""
        assert self._table is not None, "the first of several stages embeds"
        x = ops.embedding(ids, self._table if isinstance(self._table, Tensor) else self._table.of(adapters))
        if self._multiplier != 1.0:
            x *= self._multiplier
        return x if self._project_in is None else ops.linear(x, self._project_in.of(adapters))

    def add_positions(self, x: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Add learned vectors of positions and token types to x [T, H] in place, if the model has them. Return x, or its norm if
        the model has an embedding norm. token_types [T] int64: None means 0 for all tokens."""
        if self._token_types is not None:
            x += self._token_types[0] if token_types is None else ops.embedding(token_types, self._token_types)
        if self._positions is not None:
            x += ops.embedding(positions, self._positions)
        return x if self._embedding_norm is None else self._embedding_norm.forward(x)

    def final_hidden(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Return the final norm [S, H] of the sum of `residual` and x [S, H], the last layer's output. `residual` is
        overwritten."""
        assert self._norm is not None, "the last of several stages ends in it"
        return self._norm.add(x, residual)

    def logits(self, hidden: Tensor, adapters: ops.TokenAdapters | None = None) -> Tensor:
        """Return logits [S, V] of `hidden` [S, H], in the model's dtype; zeros for a model without an output head. `adapters`:
        LoRA adapters of the S tokens."""
        if self._head is None:
            return torch.zeros((len(hidden), self._num_logits), dtype=self._dtype, device=hidden.device)
        if self._project_out is not None:
            hidden = ops.linear(hidden, self._project_out.of(adapters))
        logits = ops.linear(hidden, self._head.of(adapters))
        if self._scale != 1.0:
            logits *= self._scale
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
