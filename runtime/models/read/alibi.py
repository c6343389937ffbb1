"""ALiBi: attention with linear biases (Press et al. 2021). Computes the slopes with which the models were trained."""

from __future__ import annotations

import math
import struct


def slopes(num_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head: 2^(-8 i / n) for heads 1 to n, the largest power of two up to `num_heads`. Further
    heads get every other slope of 2 n heads."""
    whole = 1 << (num_heads.bit_length() - 1)
    further = geometric(2 * whole, 8)[::2][: num_heads - whole]
    return (*geometric(whole, 8), *further)


def geometric(count: int, bias_max: float) -> tuple[float, ...]:
    """Return 2^(-bias_max i / count) for i = 1 to count."""
    return tuple(math.exp2(-bias_max * index / count) for index in range(1, count + 1))


def rounded_to_bfloat16(number: float) -> float:
    """Round a positive finite `number` to the nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)
