"""Input tensors of a step at fixed addresses, unpacked from one upload."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import backends
from ops.inputs import reference
from ops.inputs.reference import Behind, StepTensors
from ops.registry import Op, ShapeClass

_place = Op(
    "place_tokens",
    ShapeClass("cpu", torch.int64),
    [
        backends.triton("place_tokens", "ops.inputs.triton_unpack:place_tokens"),
        backends.reference("place_tokens", reference.place_tokens),
    ],
)
_behind = Op(
    "place_behind",
    ShapeClass("cpu", torch.int64),
    [
        backends.triton("place_behind", "ops.inputs.triton_unpack:place_behind"),
        backends.reference("place_behind", reference.place_behind),
    ],
)
_unpack = Op(
    "unpack",
    ShapeClass("cpu", torch.int32),
    [
        backends.triton("unpack", "ops.inputs.triton_unpack:unpack"),
        backends.reference("unpack", reference.unpack),
    ],
)


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_rows: int, num_updates: int, padded_tokens: int,
    padded_rows: int,
) -> None:  # fmt: skip
    """Unpack one upload into a step's inputs and the per-row tables; its order is in ops/inputs/triton_unpack.py.

    packed [num_tokens + 4 * num_rows + 3 * num_updates] int32 or longer. Each row's count is set to its value after the step."""
    run = _unpack.runs[packed.device, packed.dtype]
    run(
        packed, to, num_tokens=num_tokens, num_rows=num_rows, num_updates=num_updates, padded_tokens=padded_tokens,
        padded_rows=padded_rows,
    )  # fmt: skip


def place_tokens(to: StepTensors, *, padded_tokens: int, padded_rows: int, uniform: bool) -> None:
    """Compute positions and slot mapping of the step unpacked last, padding included; padding slots are -1.

    `uniform`: each row has one token."""
    run = _place.runs[to.positions.device, to.positions.dtype]
    run(to, padded_tokens=padded_tokens, padded_rows=padded_rows, uniform=uniform)


def place_behind(to: StepTensors, rows: Tensor, offset: Tensor) -> Behind:
    """Return position and slot of one more token for each row of `rows` [B] int64. `offset` [1] int64: distance of the token from
    the first token that is not computed. Rows of -1 come last and are padding: their slots are -1 and their lengths 0."""
    run = _behind.runs[rows.device, rows.dtype]
    placed: Behind = run(to, rows, offset)
    return placed
