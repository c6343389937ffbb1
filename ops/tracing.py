"""Tracing: a part of a forward pass runs once with symbols instead of tensors. Later it runs in one native call.

A step of one token is hundreds of small ops. Python between them, and waiting for the GIL, would take longer than the ops. While a
stack is traced, ops are called as usual with `Symbol`s (symbols.py), for which the registry chooses kernels that record the op.
Later the native kernels compute the recorded ops, with bit-identical results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import native
from ops.attention.meta import AttentionMeta
from ops.registry import ShapeClass, forced
from ops.symbols import NotTraceable, Symbol


def can_trace(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a `Tracer` can trace on this device."""
    return forced() != "reference" and native.supports(ShapeClass(device.type, dtype)) is None


@dataclass(frozen=True, slots=True)
class StepSymbols:
    """Symbols for the tensors of a step: residual [T, width], input_ids and positions [T], and slot_mapping [T] and attn_metadata
    for each block table."""

    residual: Tensor
    input_ids: Tensor
    positions: Tensor
    slot_mapping: tuple[Tensor, ...]
    attn_metadata: tuple[AttentionMeta, ...]


class Tracer:
    """Tracer of functions (x, step) -> y. x and y [T, width] are outputs of layers that are not yet added to the residual; x may be
    None. The functions may change the step's residual in place."""

    def __init__(self, width: int, num_tables: int, *, after: bool) -> None:
        """Begin to trace. `after`: the first function receives the output of an earlier layer as x; otherwise x is None."""
        self._program = native.module.Program()
        self._residual = Symbol.of(self._program, width)
        slot_mapping = tuple(Symbol.input(torch.int64, table) for table in range(num_tables))
        starts, lens, tables = (Symbol.input(torch.int32) for _ in range(3))
        meta = AttentionMeta(starts, lens, tables, max_query_len=1, max_seq_len=1)
        self._step = StepSymbols(
            self._residual, Symbol.input(torch.int64), Symbol.input(torch.int64), slot_mapping, (meta,) * num_tables
        )
        self._first = [Symbol.of(self._program, width)] if after else []
        self._last: Tensor | None = self._first[0] if after else None

    def add(self, function: Callable[[Tensor | None, StepSymbols], Tensor]) -> None:
        """Trace a function. If it cannot be traced, raise NotTraceable and leave the tracer unchanged."""
        before = len(self._program)
        try:
            self._last = function(self._last, self._step)
        except (NotTraceable, RuntimeError) as error:  # torch's error if values are read
            self._program.truncate(before)
            raise NotTraceable(str(error)) from error

    def finish(self) -> CompiledStack:
        out = self._last
        assert isinstance(out, Symbol)
        self._program.finish([symbol.register for symbol in (self._residual, *self._first, out)])
        return CompiledStack(self._program)


class CompiledStack:
    def __init__(self, program: Any) -> None:
        self._program = program

    def run(
        self, x: Tensor | None, residual: Tensor, positions: Tensor, slot_mapping: Sequence[Tensor],
        attn_metadata: Sequence[AttentionMeta], adapters: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the traced functions in order, for x and residual [T, width], and return the last output [T, width]. adapters [T]
        int32: adapter slot of each token, -1 for none; None if no token has an adapter."""
        out = torch.empty_like(residual)
        tables = [
            (slots, meta.query_start_loc, meta.seq_lens, meta.block_tables)
            for slots, meta in zip(slot_mapping, attn_metadata, strict=False)
        ]
        given = () if adapters is None else (adapters,)
        self._program.run([residual, out] if x is None else [residual, x, out], positions, tables, *given)
        return out
