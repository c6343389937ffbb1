"""Linear layers by oneloop_native: the weight is packed once into panels of 16 output columns, its only copy.

float32, bfloat16 and float16 weights yield the same bits as their values in float32: each output is one chain of fused
multiply-adds over K in order. Quantised weights stay in blocks of 32. Activations are rounded to 8 bits in the same blocks,
products are summed exactly, and one chain of multiply-adds runs over the blocks. Rounding to 16 bits, of which 14 are used, works
alike. In all cases results do not depend on the number of tokens in the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops import native as built
from ops.gemm.blocks import CODES, as_blocks
from ops.gemm.weight import LinearWeight, check_refill
from ops.native import module as native
from ops.registry import ShapeClass
from ops.stored import BLOCKS, INT8, INT16, Stored, StoredWeight, parts_of
from ops.symbols import Symbol

_DENSE = (torch.float32, torch.bfloat16, torch.float16)
_READ = {kind for kind, block in BLOCKS.items() if block.on_cpu} | CODES | {INT8, INT16}


def supports(case: ShapeClass) -> str | None:
    """Return why the weights are not supported, or None. Activations must be float32. Weights are 16-bit or 32-bit floats, blocks
    or convertible to blocks, or to be rounded to 8 or 16 bits."""
    unread = [each for each in case.weight if each not in _READ and each.dtype not in _DENSE]
    return built.supports(case) or (f"it reads no weights in {', '.join(map(str, unread))}" if unread else None)


class NativeLinearWeight(LinearWeight):
    """Packed weight; its parts may have different formats. MXFP4 is stored as Q5_0, which represents all of its numbers; its
    power-of-two scales must be below 2^16, and those below 2^-24 become zero. 8-bit rounding uses a float16 scale per 32
    numbers of a row, 16-bit rounding a float32 scale."""

    def __init__(self, stored: Stored) -> None:
        self._keep(parts_of(stored))

    def _keep(self, parts: tuple[StoredWeight, ...]) -> None:
        packed = [_packed(part) for part in parts]
        self._packed = packed[0] if len(packed) == 1 else native.StackedLinear(packed)
        self._biases = [part.bias for part in parts]  # for later weights without a bias
        self.out_features, self.in_features = self._packed.out_features, self._packed.in_features
        self.nbytes: int = self._packed.nbytes

    def refill(self, stored: Stored) -> bool:
        """Pack the new weight next to the old one, and then free the old one, which compiled stacks reference."""
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
    return native.QuantLinear(part.format.name, part.weight, part.bias)


def _trace(x: Symbol, packed: Any) -> Symbol:
    out = Symbol.of(x.program, packed.out_features)
    x.program.linear(packed, x.register, out.register)
    return out
