"""Prompt lookup: draft tokens from an earlier occurrence of a row's last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import backends
from ops.lookup import reference
from ops.registry import Op, ShapeClass

_look_up = Op(
    "look_up",
    ShapeClass("cpu", torch.int64),
    [
        backends.triton("look_up", "ops.lookup.triton_lookup:look_up"),
        backends.reference("look_up", reference.look_up),
    ],
)


def look_up(history: Tensor, rows: Tensor, lengths: Tensor, num: int, *, shortest: int, longest: int) -> Tensor:
    """Return `num` draft ids for each row of `rows` [B] int64, as [B, num] int64. They follow the longest earlier occurrence of the
    row's last tokens (`shortest` to `longest` tokens); of several equally long ones, the latest. If the text ends, they repeat from
    that occurrence. Without an occurrence they repeat the last token.

    history [R, L] int32: token ids of each row, of which the first lengths[b] (int64, at least 1) are used."""
    run = _look_up.runs[history.device, rows.dtype]
    return run(history, rows, lengths, num, shortest=shortest, longest=longest)
