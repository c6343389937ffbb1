"""Minimum length: what would end the sequence cannot be drawn before `min_tokens` tokens."""

from __future__ import annotations

import torch

from runtime.batch import RowBinding


class MinTokens:
    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._rows: dict[int, tuple[torch.Tensor, int]] = {}  # banned ids, first position where they are allowed

    def bind(self, row: int, binding: RowBinding) -> None:
        self._rows.pop(row, None)
        params = binding.params
        banned = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if params.min_tokens and banned:
            self._rows[row] = torch.tensor(sorted(banned)), len(binding.prompt_ids) + params.min_tokens

    def apply(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> None:
        for line, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if row in self._rows:
                banned, free_from = self._rows[row]
                if position < free_from:
                    logits[line, banned] = -torch.inf

    def observe(self, rows: list[int], ids: torch.Tensor) -> None:
        pass
