"""Linear layers by oneloop_native: the weight packed once into panels of 16 output columns, its only copy.

float32, bfloat16 and float16 weights give the same bits as their values would in float32: each output is one chain of fused
multiply-adds over K in order. Quantised weights stay in their blocks of 32: activations are rounded to eight bits in the
same blocks, products are summed exactly, and one chain of multiply-adds runs over the blocks. So are weights and activations of
sixteen bits, of which 14 are used. Either way nothing depends on the number of tokens beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops import native as built
from ops.gemm.blocks import CODES, as_blocks
from ops.gemm.weight import LinearWeight, check_refill
from ops.native import module as native
from ops.registry import ShapeClass
from ops.stored import INT8, INT16, Stored, StoredWeight, WeightFormat, parts_of
from ops.symbols import Symbol

BLOCK_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"})
# MXFP4's sixteen numbers, twice as large, as Q5_0 writes them: plus 16. And the lower four bits of any four in two bytes.
_E2M1 = np.array([16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4], np.uint16) & 15
_TWO = (_E2M1[None, :] | _E2M1[:, None] << 4).reshape(256)
_LOW_BITS = (_TWO[None, :] | _TWO[:, None] << 8).reshape(1 << 16)
_DENSE = (torch.float32, torch.bfloat16, torch.float16)
_SLICE = 4096  # blocks whose conversion stays in the cache


def supports(case: ShapeClass) -> str | None:
    """float32 activations, and weights in 32 or 16 bits, in blocks or what becomes some, or to be rounded to 8 or 16 bits."""
    known = {WeightFormat(name) for name in BLOCK_TYPES} | CODES | {INT8}
    if INT16 in case.weight:
        if (why := built.lacks("ShortLinear")) is not None:
            return why
        known = known | {INT16}
    unread = [each for each in case.weight if each not in known and each.dtype not in _DENSE]
    return built.supports(case) or (f"it reads no weights in {', '.join(map(str, unread))}" if unread else None)


class NativeLinearWeight(LinearWeight):
    """Rows of several formats may follow each other: a merged projection's need not agree. MXFP4 is kept as Q5_0, which has all
    of its numbers; its scales, whole powers of two, must be less than 2^16, and those below 2^-24 become zero. What is rounded
    to eight bits has a half-precision scale for every 32 of a row, what is rounded to sixteen a float32 one."""

    def __init__(self, stored: Stored) -> None:
        self._keep(parts_of(stored))

    def _keep(self, parts: tuple[StoredWeight, ...]) -> None:
        packed = [_packed(part) for part in parts]
        self._packed = packed[0] if len(packed) == 1 else native.StackedLinear(packed)
        self._biases = [part.bias for part in parts]  # for a later weight that comes without
        self.out_features, self.in_features = self._packed.out_features, self._packed.in_features
        self.nbytes: int = self._packed.nbytes

    def refill(self, stored: Stored) -> bool:
        """Packed beside the old weight, which then goes: compiled stacks hold on to that."""
        parts = parts_of(stored)
        if any("weight" not in part.tensors for part in parts):
            raise ValueError("the bias of a packed weight is replaced together with the weight")
        if all(part.bias is None for part in parts) and any(bias is not None for bias in self._biases):
            if len(parts) != len(self._biases):
                raise ValueError(
                    f"{len(parts)} parts where {len(self._biases)} are kept: their biases must come with them"
                )
            parts = tuple(part.with_bias(bias) for part, bias in zip(parts, self._biases, strict=True))
        new = NativeLinearWeight(parts)
        check_refill("weight", (new.out_features, new.in_features), (self.out_features, self.in_features))
        self._packed, self._biases, self.nbytes = new._packed, new._biases, new.nbytes
        return False

    def matmul(self, x: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return _trace(x, self._packed)
        out = x.new_empty(x.shape[0], self.out_features)
        self._packed.matmul(x, out)
        return out

    def matmul_into(self, x: Tensor, out: Tensor) -> None:
        """Write x @ weight.T into out; both have their last dim contiguous."""
        self._packed.matmul(x, out)

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], self.in_features)
        self._packed.rows(ids, out)
        return out


def _packed(part: StoredWeight) -> Any:
    if part.format in CODES:
        return _packed(as_blocks(part))
    if part.format == INT8:
        return native.QuantLinear.rounded(part.weight, part.bias)
    if part.format == INT16:
        return native.ShortLinear(part.weight, part.bias)
    if part.format.dtype is not None:
        return native.PackedLinear(part.weight, part.bias)
    if part.format.name == "MXFP4":
        return native.QuantLinear("Q5_0", _as_q5_0(part.weight), part.bias)
    return native.QuantLinear(part.format.name, part.weight, part.bias)


def _trace(x: Symbol, packed: Any) -> Symbol:
    out = Symbol.of(x.program, packed.out_features)
    x.program.linear(packed, x.register, out.register)
    return out


def _as_q5_0(mxfp4: Tensor) -> Tensor:
    """Rows in the one format's blocks -> in the other's."""
    blocks = mxfp4.numpy().reshape(-1, 17)
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
    return torch.from_numpy(out.reshape(len(mxfp4), -1))


def _bits(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Each eight of them as the bits of a byte, lowest first: np.packbits, faster. A product moves flag i to bit 56 + i."""
    return (flags.view(np.uint64) * np.uint64(0x0102040810204080) >> np.uint64(56)).astype(np.uint8)
