"""Formats that Triton kernels write into the KV cache: plain numbers, fp8, and int8 entries with a scale."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(x, cache_ptr, per_scale):
    # x, as the cache's numbers: where these are fp8, times per_scale and no larger than the largest of them (eight_bits.py); a NaN
    # is neither larger nor smaller, and stays.
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32) * per_scale
        x = tl.where(x > 448.0, 448.0, x)
        x = tl.where(x < -448.0, -448.0, x)
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def int8_scale(largest, broken):
    # The scale of a head's numbers (eight_bits.py); `broken` is NaN if one of them is NaN or infinite, else 0.
    return largest / 127.0 + broken


@triton.jit
def int8_numbers(x, scale):
    # x in units of `scale`, to the nearest, even of two: adding and taking away 3 * 2^22 leaves no bits of a fraction.
    rounded = x.to(tl.float32) / tl.where(scale > 0, scale, 1.0) + 12582912.0 - 12582912.0
    return tl.where(scale > 0, rounded, 0.0).to(tl.int8)
