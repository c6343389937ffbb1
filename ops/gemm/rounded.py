"""Quantised activation rows, as codes and scales, the input of 8-bit linear layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_COLUMNS = 16384  # maximum row length that stays in registers


class RoundedRows(NamedTuple):
    """Quantised activations: codes [T, K] uint8 times scales [groups, T] float32. `dtype`: dtype before quantisation."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]


def fits(in_features: int, groups: int) -> bool:
    """Return whether triton_normed.py can quantise rows of this size. A row is read at once; a group has a power of two of
    columns."""
    group = in_features // groups
    return in_features <= _MAX_COLUMNS and (groups == 1 or group & (group - 1) == 0)
