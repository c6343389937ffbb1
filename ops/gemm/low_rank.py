"""LowRank: adapter term that a linear layer's kernel adds to each row at its end."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

COLUMNS = 128  # output columns per block: all of one part, or half gates and half their ups


class LowRank(NamedTuple):
    """Term scale * h b^T of each row's own slot. h [pieces, T as sorted, parts, rank] float32, summed over pieces; b [slots,
    N, rank], scale [slots, parts] float32, slots at equal distances; slots [T], order [T], tiles [3, M] and used [2] as in
    `ops.lora.share.TokenAdapters`; parts [N / COLUMNS] int32: the part of each block of columns."""

    h: Tensor
    b: Tensor
    scale: Tensor
    slots: Tensor
    order: Tensor
    tiles: Tensor
    used: Tensor
    parts: Tensor
