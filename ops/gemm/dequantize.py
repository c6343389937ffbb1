"""Conversion of coded weights (`ops.stored.CODED`) to values and back, in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.stored import CODED, DECODED, DENSE, FOUR_BITS, FP8, TABLES, W4, StoredWeight, WeightFormat

MAX_FP8 = 448.0  # the largest number of E4M3
_GROUPS = (128, 64, 32)  # columns of w4 that share a scale: the largest of these that divides the number of columns
_ROWS = 2048  # rows quantised at a time, to limit float32 memory


def dequantize(stored: StoredWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [rows, columns] in x's column order, computed in float64 and rounded to `dtype`. Plain numbers become `dtype`."""
    if stored.format not in CODED:
        assert stored.format.dtype is not None, stored.format
        return stored.weight.to(dtype)
    codes, table = codes_of(stored.format, stored.weight), TABLES.get(stored.format)
    if table is None:
        numbers = codes.double()
    else:
        numbers = torch.tensor(table, dtype=torch.float64, device=codes.device)[codes.int()]
    scales, mins = of_groups(stored, "scales"), of_groups(stored, "mins")
    assert scales is not None
    groups = numbers.unflatten(1, (scales.shape[1], -1))
    if stored.format == W4:
        zeros = stored.tensors.get("zeros")
        groups = groups - (8.0 if zeros is None else zeros.double().unsqueeze(2))
    groups = groups * scales.unsqueeze(2)
    values = (groups if mins is None else groups - mins.unsqueeze(2)).flatten(1).to(dtype)
    if (order := stored.tensors.get("order")) is None:
        return values
    out = torch.empty_like(values)
    out[:, order.long()] = values
    return out


def of_groups(stored: StoredWeight, role: str) -> Tensor | None:
    """Return the tensor of a role [rows, groups] in float64, multiplied by the coarser scales of the same role; None if the weight
    lacks it."""
    fine, coarse = stored.tensors.get(role), stored.tensors.get(f"super_{role}")
    if fine is None or coarse is None:
        return None if fine is None else fine.double()
    return (fine.double().unflatten(1, (coarse.shape[1], -1)) * coarse.double().unsqueeze(2)).flatten(1)


def apart(parts: Sequence[StoredWeight]) -> str | None:
    """Return why rows of several parts cannot be one coded weight, or None if they can. All parts must have the same column order,
    and the finest groups must divide each part's groups. Parts in other or several formats are not checked."""
    if any(part.format not in CODED - DECODED for part in parts) or len({part.format for part in parts}) > 1:
        return None
    orders = [part.tensors.get("order") for part in parts]
    if any(not _equal(order, orders[0]) for order in orders):
        return "its parts have their columns in different orders"
    groups = [part.tensors["scales"].shape[1] for part in parts]
    return "its parts are in groups that do not fit each other" if any(max(groups) % each for each in groups) else None


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def codes_of(written: WeightFormat, weight: Tensor) -> Tensor:
    """Return the codes [rows, columns], one per element, in float8_e4m3fn, int8 or uint8."""
    if written not in FOUR_BITS:
        return weight
    return torch.stack([weight & 15, weight >> 4], dim=2).flatten(1)


def round_to_fp8(stored: StoredWeight) -> StoredWeight:
    """Quantise plain numbers to "fp8". A row's largest number becomes the largest E4M3 number. Raises ValueError for infinities and
    NaNs."""
    assert stored.format.name in DENSE, stored.format
    weight = stored.weight
    largest = weight.abs().amax(1, keepdim=True).float()
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight with an infinity or a NaN cannot be rounded to fp8")
    scales = torch.where(largest > 0, largest, 1.0) / MAX_FP8
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for part, scale, into in zip(weight.split(_ROWS), scales.split(_ROWS), out.split(_ROWS), strict=True):
        into.copy_((part.float() / scale).clamp_(-MAX_FP8, MAX_FP8))
    return StoredWeight(FP8, {"weight": out, "scales": scales}).with_bias(stored.bias)


def round_to_w4(stored: StoredWeight) -> StoredWeight:
    """Quantise plain numbers to "w4". A group's largest number becomes code -8, and others the nearest code up to 7. As in ggml's
    Q4_0, scales may be negative. Raises ValueError for infinities and NaNs, or if no group size divides the columns."""
    assert stored.format.name in DENSE, stored.format
    weight = stored.weight
    group = next((size for size in _GROUPS if weight.shape[1] % size == 0), None)
    if group is None:
        raise ValueError(
            f"a weight of {weight.shape[1]} columns cannot be rounded to w4, whose groups are of {_GROUPS[-1]}"
        )
    low, high = weight.unflatten(1, (-1, group)).float().aminmax(dim=2)
    largest = torch.where(-low >= high, low, high)
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight with an infinity or a NaN cannot be rounded to w4")
    scales = torch.where(largest == 0, 8.0, largest) / -8
    out = torch.empty((len(weight), weight.shape[1] // 2), dtype=torch.uint8, device=weight.device)
    for part, scale, into in zip(weight.split(_ROWS), scales.split(_ROWS), out.split(_ROWS), strict=True):
        codes = (part.float().unflatten(1, (-1, group)) / scale[:, :, None]).round_().clamp_(-8, 7).flatten(1) + 8
        pairs = codes.to(torch.uint8).unflatten(1, (-1, 2))
        into.copy_(pairs[:, :, 0] | pairs[:, :, 1] << 4)
    return StoredWeight(W4, {"weight": out, "scales": scales}).with_bias(stored.bias)
