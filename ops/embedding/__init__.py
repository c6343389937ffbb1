"""Rows of an embedding table by token id."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ops import backends
from ops.gemm.weight import LinearWeight
from ops.registry import USUAL, Op

_embedding = Op(
    "embedding",
    USUAL,
    [
        backends.triton("embedding", "ops.embedding.triton_embedding:embedding"),
        backends.reference("embedding", functional.embedding),
    ],
)


def embedding(ids: Tensor, table: Tensor | LinearWeight) -> Tensor:
    """Return rows `ids` [T] int64 of table [V, H], as [T, H]. A tied embedding reads them from the prepared lm_head."""
    return (
        table.rows(ids) if isinstance(table, LinearWeight) else _embedding.runs[table.device, table.dtype](ids, table)
    )
