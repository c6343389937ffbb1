"""Rows of a table by id, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return functional.embedding(ids, table)
