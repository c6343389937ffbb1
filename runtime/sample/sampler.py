"""Sampler: the stages in their order, then the draw."""

from __future__ import annotations

import torch

from runtime.batch import RowBinding
from runtime.sample.draw import Draw
from runtime.sample.logit_bias import LogitBias
from runtime.sample.min_tokens import MinTokens
from runtime.sample.penalties import Penalties
from runtime.sample.stage import Stage


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._stages: tuple[Stage, ...] = (Penalties(vocab_size), LogitBias(), MinTokens(eos_token_ids))
        self._draw = Draw()

    def bind(self, row: int, binding: RowBinding) -> None:
        for stage in self._stages:
            stage.bind(row, binding)
        self._draw.bind(row, binding)

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """logits [S, V] float32, changed in place -> ids [S] int64. Line s belongs to rows[s], whose token gets positions[s]."""
        for stage in self._stages:
            stage.apply(logits, rows, positions)
        ids = self._draw(logits, rows, positions)
        for stage in self._stages:
            stage.observe(rows, ids)
        return ids
