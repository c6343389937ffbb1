"""Look-up: what followed the last tokens of a row where they stood before."""

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
    """The `num` ids that may follow each of `rows` [B] int64, [B, num] int64: those behind the place where most of its last tokens
    stood before, `longest` at most and `shortest` at least, and of such places the latest; where they reach the end of the text it
    goes round. The last token again and again where there is no such place.

    history [R, L] int32: the ids of each row, of which its first lengths[b] (int64, 1 at least) are meant."""
    run = _look_up.runs[history.device, rows.dtype]
    return run(history, rows, lengths, num, shortest=shortest, longest=longest)
