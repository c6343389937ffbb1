"""Presence, frequency and repetition penalties.

Presence and frequency (OpenAI): subtract `presence` once and `frequency` per occurrence, for tokens of the output.
Repetition (Keskar et al. 2019, CTRL): divide positive logits, multiply negative ones, for tokens of prompt and output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.batch import RowBinding


@dataclass(frozen=True, slots=True)
class _Row:
    presence: float
    frequency: float
    repetition: float
    counts: torch.Tensor  # [V] float32, occurrences in the output
    seen: torch.Tensor  # [V] bool, prompt or output


class Penalties:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}  # only rows that ask: the counts are as long as the vocabulary

    def bind(self, row: int, binding: RowBinding) -> None:
        self._rows.pop(row, None)
        params = binding.params
        if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0 and params.repetition_penalty == 1.0:
            return
        outputs = torch.tensor(binding.output_ids, dtype=torch.int64)
        counts = torch.bincount(outputs, minlength=self._vocab_size).to(torch.float32)
        seen = counts > 0
        seen[torch.tensor(binding.prompt_ids, dtype=torch.int64)] = True
        self._rows[row] = _Row(
            params.presence_penalty, params.frequency_penalty, params.repetition_penalty, counts, seen
        )

    def apply(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> None:
        for line, row in enumerate(rows):
            state = self._rows.get(row)
            if state is None:
                continue
            scores = logits[line]
            if state.repetition != 1.0:
                punished = torch.where(scores > 0, scores / state.repetition, scores * state.repetition)
                scores.copy_(torch.where(state.seen, punished, scores))
            scores.sub_(state.counts * state.frequency + (state.counts > 0) * state.presence)

    def observe(self, rows: list[int], ids: torch.Tensor) -> None:
        for line, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None:
                state.counts[ids[line]] += 1
                state.seen[ids[line]] = True
