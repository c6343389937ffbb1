"""Weights: what blocks take theirs from when they are built, by the names that the spec gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

import ops


class Weights(NamedTuple):
    """`linears`: prepared matrices by the names of `spec.linears()`. `experts`: by those of `spec.experts()`. `tensors`:
    everything else, by parameter."""

    linears: Mapping[str, ops.LinearWeight]
    tensors: Mapping[str, Tensor]
    experts: Mapping[str, ops.ExpertWeights]
