"""Element types of loaded weights as numpy arrays: float32, float16, and bfloat16. numpy has no bfloat16, so its bits are
uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.weights.dequantize import Floats
from runtime.weights.rules import (
    ConvolutionKernel,
    GroupedRows,
    InterleavedHalves,
    InterleavedRope,
    OneRow,
    Shape,
    SwappedHalves,
    Transform,
    Transposed,
    UnitOffsetNorm,
    WeightsError,
)

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.uint16]

ARRAY_TYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

_SLICE = 1 << 18


def empty(shape: Shape, dtype: str) -> Array:
    """Return an uninitialised array. Raises WeightsError for a dtype that is not supported."""
    if dtype not in ARRAY_TYPES:
        raise WeightsError(f"weights cannot be loaded as {dtype}, only as {', '.join(ARRAY_TYPES)}")
    return np.empty(shape, ARRAY_TYPES[dtype])


def store(values: Floats, out: Array) -> None:
    """Round float32 `values` into `out`, a contiguous array of the same shape. Ties round to even."""
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
    # Rounding would turn a NaN with a long payload into infinity.
    np.copyto(rounded, (bits >> 16) | 0x40, where=np.isnan(values))
    out[...] = rounded


def undo(transform: Transform, values: Array, shape: Shape) -> Array:
    """Undo `transform` of stored `values`, which may be overwritten. Return a C-contiguous array of the parameter's `shape`."""
    match transform:
        case UnitOffsetNorm():  # float32, regardless of the model's dtype
            values += 1
            return values
        case Transposed():
            return np.ascontiguousarray(values.T)
        case InterleavedRope(num_heads, head_size, rotated):
            heads = values.reshape(-1, head_size, *shape[1:])
            rotary = heads[:num_heads, :rotated]
            pairs = rotary.reshape(-1, rotated // 2, 2, *shape[1:]).swapaxes(1, 2)
            heads[:num_heads, :rotated] = pairs.reshape(rotary.shape)
            return heads.reshape(shape)
        case GroupedRows(num_groups, sizes):
            num_rows = num_groups * sum(sizes)
            groups = values[:num_rows].reshape(num_groups, sum(sizes), *shape[1:])
            kinds = np.split(groups, np.cumsum(sizes[:-1]), axis=1)
            return np.concatenate([*(kind.reshape(-1, *shape[1:]) for kind in kinds), values[num_rows:]])
        case InterleavedHalves(as_columns):
            rows = values.T if as_columns else values
            return np.ascontiguousarray(rows.reshape(-1, 2, *shape[1:]).swapaxes(0, 1)).reshape(shape)
        case SwappedHalves():
            return np.concatenate(np.split(values, 2)[::-1])
        case OneRow():
            return values.reshape(shape)
        case ConvolutionKernel():
            return np.ascontiguousarray(values.swapaxes(1, 2)).reshape(shape)
