"""Linear layers by oneloop_native: the weight packed once into panels of 16 output columns, its only copy.

float32, bfloat16 and float16 weights give the same bits as their values would in float32: each output is one chain of fused
multiply-adds over K in order. Quantised weights stay in their blocks of 32: activations are rounded to eight bits in the
same blocks, products are summed exactly, and one chain of multiply-adds runs over the blocks. Either way nothing depends on
the number of tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.gemm.weight import BlockRows, LinearWeight
from ops.native import module as native
from ops.symbols import Symbol

BLOCK_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"})
# MXFP4's sixteen numbers, twice as large, as Q5_0 writes them: plus 16. And the lower four bits of any four in two bytes.
_E2M1 = np.array([16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4], np.uint16) & 15
_TWO = (_E2M1[None, :] | _E2M1[:, None] << 4).reshape(256)
_LOW_BITS = (_TWO[None, :] | _TWO[:, None] << 8).reshape(1 << 16)
_SLICE = 4096  # blocks whose conversion stays in the cache


class NativeWeight(LinearWeight):
    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self.nbytes = packed.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return _record(x, self._packed)
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


def _record(x: Symbol, packed: Any) -> Symbol:
    out = Symbol.of(x.program, packed.out_features)
    x.program.linear(packed, x.register, out.register)
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
    blocks = mxfp4.data.numpy().reshape(-1, 17)
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    if (scales >= 1 << 16).any():
        raise ValueError("MXFP4 with a scale of 2^16 or more")
    out = np.empty((len(blocks), 22), np.uint8)
    out[:, :2] = scales.astype(np.float16).view(np.uint8)
    for start in range(0, len(blocks), _SLICE):
        part, pairs = out[start : start + _SLICE], np.ascontiguousarray(blocks[start : start + _SLICE, 1:])
        part[:, 2:4] = _bits((pairs & 15) <= 8)  # the fifth bit says that a number is not below zero
        part[:, 4:6] = _bits(pairs < 9 << 4)
        part[:, 6:] = _LOW_BITS[pairs.view(np.uint16)].view(np.uint8)
    return BlockRows("Q5_0", torch.from_numpy(out.reshape(len(mxfp4.data), -1)))


def _bits(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Each eight of them as the bits of a byte, lowest first: np.packbits, faster. A product moves flag i to bit 56 + i."""
    return (flags.view(np.uint64) * np.uint64(0x0102040810204080) >> np.uint64(56)).astype(np.uint8)


class NativeInt8Weight(NativeWeight):
    """A float weight rounded to eight bits, a half-precision scale for every 32 of a row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(native.QuantLinear.rounded(weight, bias))
