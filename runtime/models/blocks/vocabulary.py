"""The two ends of a decoder: ids to vectors, and vectors to logits. A tied embedding is one matrix in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import ops
from runtime.models.spec import EMBEDDING, FINAL_NORM, DecoderSpec


class VocabularyBlock:
    def __init__(
        self, spec: DecoderSpec, linears: Mapping[str, ops.LinearWeight], tensors: Mapping[str, Tensor]
    ) -> None:
        self._head = linears[spec.head.name]
        self._table = self._head if spec.tied_embedding else tensors[f"{EMBEDDING}.weight"]
        self._norm = tensors[FINAL_NORM]
        self._norm_eps = spec.norm_eps

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, H], a fresh tensor."""
        return ops.embedding(ids, self._table)

    def logits(self, x: Tensor, residual: Tensor) -> Tensor:
        """What the last layer adds, x [S, H], and what it adds it to, which is overwritten -> [S, V], in the model's dtype."""
        return ops.linear(ops.add_rms_norm(x, residual, self._norm, self._norm_eps), self._head)
