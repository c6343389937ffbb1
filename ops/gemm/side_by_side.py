"""Linear layer with rows in several formats: a separate kernel computes the product of each format."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from ops.gemm.weight import LinearWeight
from ops.stored import Stored, parts_of


class SideBySide(LinearWeight):
    """Linear layer of parts in several formats. `prepare`: prepares adjacent parts of one format."""

    def __init__(self, stored: Stored, prepare: Callable[[Stored], LinearWeight]) -> None:
        runs = [tuple(run) for _, run in groupby(parts_of(stored), key=lambda part: part.format)]
        self._kept, self._sizes = [prepare(run) for run in runs], [len(run) for run in runs]
        self.in_features = self._kept[0].in_features
        self.out_features = sum(each.out_features for each in self._kept)
        self.nbytes = sum(each.nbytes for each in self._kept)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.cat([each.matmul(x) for each in self._kept], dim=1)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding is in one format")

    def refill(self, stored: Stored) -> bool:
        parts = parts_of(stored)
        if len(parts) != sum(self._sizes):
            raise ValueError(f"{len(parts)} parts where {sum(self._sizes)} are kept in several formats")
        kept_in_place, begin = True, 0
        for each, size in zip(self._kept, self._sizes, strict=True):
            kept_in_place &= each.refill(parts[begin : begin + size])
            begin += size
        return kept_in_place
