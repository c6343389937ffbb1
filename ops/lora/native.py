"""Adapters by oneloop_native: each share is packed once, in its own dtype or in fewer bits. Sums are float32 and do not
depend on other tokens of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters
from ops.native import module as native
from ops.symbols import Symbol


class NativeLoraSlots(LoraSlots):
    def __init__(self, shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape)
        self._slots: Any = native.LoraSlots(shape.out_features, shape.in_features, shape.num_slots)

    def prepared(self, parts: Sequence[LoraPart]) -> Any:
        """Return the parts in the kernel's form. Their A matrices are joined into one, so that x is read once."""
        if self.shape.bits == 8:
            a, of_a = _rounded(torch.cat([part.a.float() for part in parts]))
            b, of_b = zip(*(_rounded(part.b.float().T) for part in parts), strict=True)
            scales = (of_a * torch.cat(of_b)).tolist()
            return self._share(parts, a, [each.T.contiguous() for each in b], scales)
        types = {part.a.dtype for part in parts}
        dtype = types.pop() if len(types) == 1 else torch.float32
        if self.shape.bits < 32 and dtype == torch.float32:
            dtype = torch.bfloat16
        a = torch.cat([part.a.to(dtype) for part in parts])
        return self._share(parts, a, [part.b.to(dtype).contiguous() for part in parts])

    def _share(self, parts: Sequence[LoraPart], a: Tensor, b: Sequence[Tensor], *rank_scales: list[float]) -> Any:
        """Pack a share from a [ranks of all parts, K] and each part's b."""
        made, offset = [], 0
        for part, each in zip(parts, b, strict=True):
            made.append((native.PackedLinear(each), part.start, offset, part.scale))
            offset += part.rank
        return native.LoraShare(native.PackedLinear(a), made, self.shape.out_features, *rank_scales)

    def put(self, slot: int, share: Any | None) -> None:
        self._slots.put(slot, share)

    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        self._slots.add(x, adapters.slots, out)

    def trace(self, x: Symbol, out: Symbol) -> None:
        x.program.lora(self._slots, x.register, out.register)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = values.abs().amax(dim=1) / 127
    return (values / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), scales
