"""Gated MLP: down(silu(gate(x)) * up(x)), gate and up as one matrix."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import ops
from runtime.models.spec import DecoderSpec, layer_name


class GatedMLPBlock:
    def __init__(self, spec: DecoderSpec, index: int, linears: Mapping[str, ops.LinearWeight]) -> None:
        gate_up, down = spec.layers[index].mlp.linears(layer_name(index), spec.hidden_size)
        self._gate_up, self._down = linears[gate_up.name], linears[down.name]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return ops.linear(ops.gated_linear(x, self._gate_up), self._down)
