"""Rotary position embedding in plain torch (Su et al. 2021, RoFormer): any float dtype, any device."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate as `ops.rope` does: pairs (d, d + D_rot/2), or (2d, 2d + 1) if `interleaved`, of the first D_rot dims."""
    half = cos_sin.shape[1] // 2
    if not half:
        return
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)
    for heads in (q, k):
        rotated = heads[..., : 2 * half]
        first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.split(half, dim=-1)
        a, b = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (first, second))
        first_rotated, second_rotated = a * cos - b * sin, b * cos + a * sin
        first.copy_(first_rotated)
        second.copy_(second_rotated)
