"""Rotary position embedding by oneloop_native. q and k are views whose last dim is contiguous."""

from __future__ import annotations

from torch import Tensor

from ops.native import module as native


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    if cos_sin.shape[1]:  # else nothing rotates
        native.rope(q, k, positions, cos_sin, interleaved)
