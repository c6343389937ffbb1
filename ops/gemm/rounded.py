"""Activation rows in codes and scales, as 8-bit linear layers multiply them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_COLUMNS = 16384  # of a row that stays in registers


class RoundedRows(NamedTuple):
    """Rounded activations: codes [T, K] uint8 times scales [groups, T] float32. `dtype`: dtype before rounding."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]


def fits(in_features: int, groups: int) -> bool:
    """Return whether triton_normed.py can round such rows: each is read at once, in groups of a power of two of columns."""
    group = in_features // groups
    return in_features <= _MAX_COLUMNS and (groups == 1 or group & (group - 1) == 0)
