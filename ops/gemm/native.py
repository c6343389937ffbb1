"""Linear layers by oneloop_native: the weight packed once into panels of 16 output columns, its only copy.

float32, bfloat16 and float16 weights give the same bits as their values would in float32: each output is one chain of fused
multiply-adds over K in order. Quantised weights stay in their blocks of 32: activations are rounded to eight bits in the
same blocks, products are summed exactly, and one chain of multiply-adds runs over the blocks. Either way nothing depends on
the number of tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.gemm.weight import BlockRows, LinearWeight
from ops.native import module as native

BLOCK_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"})
# MXFP4's sixteen numbers, twice as large, as Q5_0 would write them: plus 16.
_E2M1 = torch.tensor([16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4], dtype=torch.uint8)


class NativeWeight(LinearWeight):
    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self.nbytes = packed.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        self._packed.matmul(x, out)
        return out

    def matmul_into(self, x: Tensor, out: Tensor) -> None:
        """Both with their last dim contiguous."""
        self._packed.matmul(x, out)

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], self.in_features)
        self._packed.rows(ids, out)
        return out


class NativeLinearWeight(NativeWeight):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(native.PackedLinear(weight, bias))


class NativeBlockWeight(NativeWeight):
    """Rows of several types may follow each other: a merged projection's need not agree. MXFP4 is kept as Q5_0, which has
    all of its numbers; its scales, whole powers of two, must be less than 2^16, and those below 2^-24 become zero."""

    def __init__(self, parts: Sequence[BlockRows], bias: Tensor | None) -> None:
        biases: Sequence[Tensor | None] = [bias] * len(parts)
        if bias is not None and len(parts) > 1:
            biases = bias.split([len(part.data) for part in parts])
        rows = [_as_q5_0(part) if part.type == "MXFP4" else part for part in parts]
        packed = [native.QuantLinear(part.type, part.data, b) for part, b in zip(rows, biases, strict=True)]
        super().__init__(packed[0] if len(packed) == 1 else native.StackedLinear(packed))


def _as_q5_0(mxfp4: BlockRows) -> BlockRows:
    blocks = mxfp4.data.unflatten(1, (-1, 17))
    exponents = blocks[..., :1].int() - 128
    scales = torch.ldexp(torch.ones(exponents.shape), exponents).half()
    if scales.isinf().any():
        raise ValueError("MXFP4 with a scale of 2^16 or more")
    numbers = torch.cat([_E2M1[(blocks[..., 1:] & 15).int()], _E2M1[(blocks[..., 1:] >> 4).int()]], -1)
    fifth = (numbers >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    low = numbers[..., :16] & 15 | numbers[..., 16:] << 4
    packed = torch.cat([scales.view(torch.uint8), fifth.sum(-1, dtype=torch.uint8), low], -1)
    return BlockRows("Q5_0", packed.flatten(1))


class NativeInt8Weight(NativeWeight):
    """A float weight rounded to eight bits, a half-precision scale for every 32 of a row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(native.QuantLinear.rounded(weight, bias))
