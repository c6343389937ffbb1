"""Symbols: placeholders for a step's tensors while a stack is traced (tracing.py).

An op called with symbols uses its tracing kernel, in traced.py of its folder, which records the op and computes nothing. Any other
operation on a symbol raises NotTraceable, so no operation is silently left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DEVICE = "meta"  # torch's device of tensors with shapes but no data


class NotTraceable(Exception):
    """Error: an operation on a symbol cannot be traced; the message names it."""


class Symbol(Tensor):
    """Placeholder for a tensor: `register` of a program, [1, width] float32. If `register` is None, it is an input of every step.
    `table`: for slots, the index of their block table."""

    program: Any
    register: int | None
    table: int | None

    @staticmethod
    def of(program: Any, width: int) -> Symbol:
        return Symbol._make((1, width), torch.float32, program, program.register(width), None)

    @staticmethod
    def input(dtype: torch.dtype, table: int | None = None) -> Symbol:
        return Symbol._make((1,), dtype, None, None, table)

    @staticmethod
    def _make(
        shape: tuple[int, ...], dtype: torch.dtype, program: Any, register: int | None, table: int | None
    ) -> Symbol:
        make: Any = Tensor._make_wrapper_subclass
        symbol: Symbol = make(Symbol, shape, dtype=dtype, device=DEVICE)
        symbol.program, symbol.register, symbol.table = program, register, table
        return symbol

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x, *others = args
        if isinstance(x, Symbol) and x.register is not None and not others and not kwargs:
            if func is torch.ops.aten.clone.default:
                copy = Symbol.of(x.program, x.shape[1])
                x.program.copy(x.register, copy.register)
                return copy
            if func is torch.ops.aten.zero_.default:
                x.program.zero(x.register)
                return x
        if isinstance(x, Symbol) and x.register is not None and len(others) == 1 and not kwargs:
            other = others[0]
            if func is torch.ops.aten.mul_.Tensor and isinstance(other, int | float):
                x.program.scale(x.register, other)
                return x
            if func is torch.ops.aten.add_.Tensor and isinstance(other, Symbol) and other.shape == x.shape:
                x.program.add(x.register, other.register)
                return x
        raise NotTraceable(str(func))
