"""Undoing the forms in which checkpoints store some tensors: the same numbers in another order, or less one."""

from __future__ import annotations

import numpy as np

from runtime.weights.dtypes import Array
from runtime.weights.rules import (
    GroupedRows,
    InterleavedHalves,
    InterleavedRope,
    OneRow,
    Shape,
    SwappedHalves,
    Transform,
    Transposed,
    UnitOffsetNorm,
)


def undo(transform: Transform, values: Array, shape: Shape) -> Array:
    """`values`, which may be overwritten, as the parameter of this shape that they are, C-contiguous."""
    match transform:
        case UnitOffsetNorm():  # float32, whatever the model's dtype
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
