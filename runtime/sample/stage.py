"""Stage: one ordered change to the logits, with its own state per row. A new sampling feature is one more of these."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime.batch import RowBinding


class Stage(Protocol):
    def bind(self, row: int, binding: RowBinding) -> None:
        """A new sequence has taken `row`: replace whatever was kept for the last one."""
        ...

    def apply(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> None:
        """Change `logits` [S, V] float32 in place; line s belongs to `rows[s]`, whose next token has index `positions[s]`."""
        ...

    def observe(self, rows: list[int], ids: torch.Tensor) -> None:
        """`ids` [S] int64 were sampled; state that counts outputs takes them in, on the device."""
        ...
