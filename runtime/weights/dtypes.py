"""Element types of loaded weights as numpy arrays: float32, float16, and bfloat16 as its bits, which numpy has no type for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.weights.dequantize import Floats
from runtime.weights.rules import Shape, WeightsError

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.uint16]

ARRAY_TYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

_SLICE = 1 << 18


def empty(shape: Shape, dtype: str) -> Array:
    """Raises WeightsError for a dtype that weights cannot have."""
    if dtype not in ARRAY_TYPES:
        raise WeightsError(f"weights cannot be loaded as {dtype}, only as {', '.join(ARRAY_TYPES)}")
    return np.empty(shape, ARRAY_TYPES[dtype])


def store(values: Floats, out: Array) -> None:
    """Round float32 values into `out` of the same shape, contiguous, of one of ARRAY_TYPES: to nearest, ties to even."""
    if out.dtype == np.uint16:
        flat, bits = values.reshape(-1), out.reshape(-1)
        for start in range(0, len(flat), _SLICE):
            _round_to_bfloat16(flat[start : start + _SLICE], bits[start : start + _SLICE])
    else:
        with np.errstate(over="ignore"):
            out[...] = values


def _round_to_bfloat16(values: Floats, out: Bits) -> None:
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding would carry a NaN with a long payload into infinity or worse.
    np.copyto(rounded, (bits >> 16) | 0x40, where=np.isnan(values))
    out[...] = rounded
