"""Entries of an int8 KV cache, for one head's key or value of one token, in plain torch.

An entry has D numbers in [-127, 127] and a float32 scale in four bytes, absolute maximum / 127 of the head, so tokens are
independent (as vLLM's int8_per_token_head; symmetric per-token rounding: ZeroQuant, Yao et al. 2022). A head of zeros has
scale 0; a head with NaN or infinity has scale NaN, which propagates to the reader."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def to_int8_entries(x: Tensor) -> Tensor:
    """Encode x [..., D] of any float dtype to [..., D + SCALE_BYTES] int8."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    scale = scale.where(scale.isfinite(), torch.nan)
    numbers = (x / scale).round().clamp(-127, 127).where(scale > 0, 0.0)
    return torch.cat([numbers.to(torch.int8), scale.view(torch.int8)], dim=-1)


def from_int8_entries(entries: Tensor) -> Tensor:
    """Decode entries [..., D + SCALE_BYTES] int8 to [..., D] float32."""
    numbers, scale = entries[..., :-SCALE_BYTES], entries[..., -SCALE_BYTES:]
    aligned = scale.clone(memory_format=torch.contiguous_format)  # `contiguous` does not copy a single entry
    return numbers.float() * aligned.view(torch.float32)


def scales_of(cache: Tensor) -> Tensor | None:
    """Return an int8 cache's memory as float32, where the last of each D / 4 + 1 is a scale (D is a multiple of 4); None for
    other caches."""
    return cache.view(torch.float32) if cache.dtype == torch.int8 else None


# Numbers of an fp8 cache (E4M3: OCP 8-bit Floating Point Specification, 2023), in plain torch. Such a cache has one
# scale for all keys of a layer and one for all values, from the checkpoint or 1. Written numbers are divided by it, and
# read numbers are multiplied. E4M3 has three bits of mantissa from 2^-6 to 448 and even steps of 2^-9
# below, so that a scale of 1 suits usual keys and values. Larger numbers become 448, as with the
# device's own instruction; NaNs stay.
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
UNSCALED = (1.0, 1.0)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Convert x of any float dtype to fp8 numbers of `x / scale`, same shape."""
    return (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(FP8)
