"""Rotary position embedding (Su et al. 2021) of queries and keys."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.native import module as native
from ops.registry import USUAL, Op
from ops.rope import reference


def _natively(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    if cos_sin.shape[1]:  # otherwise nothing is rotated
        native.rope(q, k, positions, cos_sin, interleaved)


_rope = Op("rope", USUAL, [backends.native("rope", _natively), backends.reference("rope", reference.rope)])


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by their positions [T] int64.

    cos_sin [max_pos, D_rot] float32 has D_rot / 2 cosines, then as many sines. Only the first D_rot <= D dims are rotated;
    D_rot may be 0. q and k may be views into one qkv tensor if their last dim is contiguous."""
    _rope.runs[q.device, q.dtype](q, k, positions, cos_sin, interleaved)
