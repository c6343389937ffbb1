"""A step's inputs at fixed addresses, spread out of one upload."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import backends
from ops.inputs import reference
from ops.inputs.tensors import StepTensors
from ops.registry import Op, ShapeClass

_unpack = Op(
    "unpack",
    ShapeClass("cpu", torch.int32),
    [
        backends.triton("unpack", "ops.inputs.triton_unpack:unpack"),
        backends.reference("unpack", reference.unpack),
    ],
)


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_lines: int, num_updates: int, padded_tokens: int,
    padded_lines: int,
) -> None:  # fmt: skip
    """Spread one upload over the inputs of a step and the block tables; see ops/inputs/triton_unpack.py for its order.

    packed [(2 + G) * num_tokens + 4 * num_lines + 3 * num_updates] int32 or longer, for G block tables of each row."""
    run = _unpack.runs[packed.device, packed.dtype]
    run(
        packed, to, num_tokens=num_tokens, num_lines=num_lines, num_updates=num_updates, padded_tokens=padded_tokens,
        padded_lines=padded_lines,
    )  # fmt: skip
