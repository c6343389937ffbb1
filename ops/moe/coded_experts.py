"""Experts that are kept as they are written, in codes: how each is filled in."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ops.gemm.weight import overwrite
from ops.moe.triton_experts import GroupedExpertWeights, tiles_for
from ops.moe.weights import ExpertShape, Half
from ops.stored import Stored, StoredWeight, bias_of, parts_of


class CodedGroupedExpertWeights(GroupedExpertWeights):
    """Biases are [E, out], or none. `_weights`: of each half what the kind of code needs, once an expert was filled in."""

    takes_adapters = False

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.nbytes = shape, 0
        self._dtype, self._device, self._tiles = dtype, device, tiles_for(dtype, device)
        self._weights: dict[Half, Any] = {}
        self._biases: dict[Half, Tensor] = {}

    def fill(self, half: Half, expert: int, stored: Stored) -> None:
        parts = parts_of(stored)
        if all("weight" in part.tensors for part in parts):
            self._fill_weight(half, expert, parts)
        bias = bias_of(parts)
        if bias is None:
            return
        if half not in self._biases and self.shape.bias:
            room = (self.shape.num_experts, self.shape.matrix(half)[0])
            self._biases[half] = torch.empty(room, dtype=self._dtype, device=self._device)
            self.nbytes += self._biases[half].nbytes
        overwrite(self._biases[half][expert] if self.shape.bias else None, bias, "bias")

    @abstractmethod
    def _fill_weight(self, half: Half, expert: int, parts: tuple[StoredWeight, ...]) -> None:
        """Raises ValueError where it does not fit what is kept of the others."""

    def _room(self, one: Tensor) -> Tensor:
        """For one of each expert."""
        return one.new_empty((self.shape.num_experts, *one.shape), device=self._device)
