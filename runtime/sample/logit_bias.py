"""Logit bias: a constant added to chosen tokens."""

from __future__ import annotations

import torch

from runtime.batch import RowBinding


class LogitBias:
    def __init__(self) -> None:
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # ids [B] int64, biases [B] float32

    def bind(self, row: int, binding: RowBinding) -> None:
        self._rows.pop(row, None)
        bias = binding.params.logit_bias
        if bias:
            self._rows[row] = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> None:
        for line, row in enumerate(rows):
            if row in self._rows:
                ids, biases = self._rows[row]
                logits[line, ids] += biases

    def observe(self, rows: list[int], ids: torch.Tensor) -> None:
        pass
