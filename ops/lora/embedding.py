"""LoRA adapters of an embedding. A has a column for each id, so x A^T is a lookup in A's transpose. B is applied like the adapter
of a linear layer whose own A is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters

_ALIGNMENT = 16  # in bytes, of data after a table
_LEAST_COLUMNS = 8  # minimum columns of a table: rows are a multiple of 16 bytes


class EmbeddingSlots(LoraSlots):
    """Slots of an embedding's adapters. `shape`: of the transpose [H, V]; a share's a is [r, V], b [H, r]. `expands`: slots
    of a layer with H outputs and `columns` inputs."""

    def __init__(self, shape: LoraShape, expands: LoraSlots) -> None:
        super().__init__(shape)
        self._expands = expands
        self._columns = expands.shape.in_features

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        """Add the adapter's change for each id x [T] int64 to out [T, H]."""
        self._expands.add(self._looked_up(x, adapters), adapters, out)

    def _looked_up(self, ids: Tensor, adapters: TokenAdapters) -> Tensor:
        """Return rows of A's transpose [T, columns] for the token ids. Rows of tokens without an adapter are undefined."""
        raise NotImplementedError

    def _behind(self, part: LoraPart) -> LoraPart:
        return LoraPart(0, torch.eye(part.rank, self._columns, dtype=part.b.dtype), part.b, part.scale)


def columns(max_rank: int) -> int:
    """Return the number of columns of a table for adapters of at most this rank."""
    return -(-max_rank // _LEAST_COLUMNS) * _LEAST_COLUMNS


class EmbeddingTables(EmbeddingSlots):
    """Adapters of an embedding, with a separate table per slot. The host reads which adapters a step uses."""

    def __init__(self, shape: LoraShape, expands: LoraSlots) -> None:
        super().__init__(shape, expands)
        self._tables: dict[int, Tensor] = {}

    def prepared(self, parts: Sequence[LoraPart]) -> Any:
        (part,) = parts
        return part.a.T.contiguous(), self._expands.prepared([self._behind(part)])

    def put(self, slot: int, share: Any | None) -> None:
        self._tables.pop(slot, None)
        if share is not None:
            self._tables[slot] = share[0]
        self._expands.put(slot, None if share is None else share[1])

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        if self._tables:
            super().add(x, adapters, out)

    def _looked_up(self, ids: Tensor, adapters: TokenAdapters) -> Tensor:
        found = torch.zeros(len(ids), self._columns, device=ids.device)
        for slot, table in self._tables.items():
            tokens = (adapters.slots == slot).nonzero().flatten()
            found[tokens, : table.shape[1]] = table[ids[tokens]].float()
        return found


class DeviceTables(EmbeddingSlots):
    """Embedding adapters with all slots' tables in one tensor, before the slots of `expands`. `dtype`: of activations and
    tables."""

    def __init__(self, shape: LoraShape, expands: LoraSlots, dtype: torch.dtype) -> None:
        super().__init__(shape, expands)
        self._dtype = dtype
        self._table_bytes = shape.in_features * self._columns * dtype.itemsize
        self.slot_bytes = self._place + expands.slot_bytes
        self.nbytes = shape.num_slots * self.slot_bytes
        self._tables: Tensor | None = None

    @property
    def _place(self) -> int:
        return -(-self._table_bytes // _ALIGNMENT) * _ALIGNMENT

    def _table(self, memory: Tensor) -> Tensor:
        """View memory [..., slot_bytes] uint8 as tables [..., V, columns]."""
        return memory[..., : self._table_bytes].view(self._dtype).unflatten(-1, (self.shape.in_features, self._columns))

    def bind(self, memory: Tensor) -> None:
        self._tables = self._table(memory)
        self._expands.bind(memory[:, self._place :])

    def write(self, parts: Sequence[LoraPart], memory: Tensor) -> None:
        (part,) = parts
        self._table(memory)[:, : part.rank] = part.a.T
        self._expands.write([self._behind(part)], memory[self._place :])

    def prepared(self, parts: Sequence[LoraPart]) -> Any:
        raise TypeError("it lies in the memory that all layers have in common")

    def put(self, slot: int, share: Any | None) -> None:
        raise TypeError("it lies in the memory that all layers have in common")

    def _looked_up(self, ids: Tensor, adapters: TokenAdapters) -> Tensor:
        assert self._tables is not None, "no slots were bound"
        return self._tables[adapters.slots.clamp(min=0).long(), ids]
