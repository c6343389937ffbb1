"""Numbers of an fp8 cache (E4M3: OCP 8-bit Floating Point Specification, 2023), in plain torch.

A cache of them has one scale for all keys of a layer and one for all values: a checkpoint's, or 1, by which what is written is
divided, and what is read is multiplied. E4M3 has three bits of mantissa from 2^-6 to 448 and even steps of 2^-9 below, so that a
scale of 1 suits keys and values as models have them. What is beyond 448 becomes 448, as the device's own instruction has it; NaNs
stay."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
UNSCALED = (1.0, 1.0)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x of any float dtype -> the numbers of `x / scale`, same shape."""
    return (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(FP8)
