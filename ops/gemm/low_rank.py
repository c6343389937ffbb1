"""LowRank: what a linear layer's product adds where it ends, to each row its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

COLUMNS = 128  # of the output, of a block: all of one part, or half of them gates and half their ups


class LowRank(NamedTuple):
    """scale * h b^T, of its own slot for each of T rows. h [pieces, T as sorted, parts, rank] float32, whose sum over pieces it is;
    b [slots, N, rank], scale [slots, parts] float32, slots equally far from each other; slots [T], order [T], tiles [3, M] and
    used [2] as `ops.lora.share.TokenAdapters` has them; parts [N / COLUMNS] int32: of each block's columns, what part they are."""

    h: Tensor
    b: Tensor
    scale: Tensor
    slots: Tensor
    order: Tensor
    tiles: Tensor
    used: Tensor
    parts: Tensor
