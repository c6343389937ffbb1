"""Recording: a stretch of a forward pass is run once on symbols instead of tensors, and from then on by one native call.

A step of one token is hundreds of small ops; between them Python, and the wait for its lock, cost more than the ops. While
a recording is made, ops are called as ever, with `Symbol`s: the registry takes the kernels below, which note what is to be
done. Whatever else is done to a symbol raises NotRecordable, so nothing can be left out unseen. What runs later are the
native kernels on the same numbers: not a bit differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import native
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.registry import ShapeClass

DEVICE = "meta"  # where torch keeps tensors that have a shape and no numbers


class NotRecordable(Exception):
    """The message says what was done."""


class Symbol(Tensor):
    """A tensor of a step to come: `register` of a program, [1, width] float32; or an input of every step, `register` None.

    `table`: of slots, the block table that they are of."""

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
        if isinstance(x, Symbol) and x.register is not None and len(others) == 1 and not kwargs:
            other = others[0]
            if func is torch.ops.aten.mul_.Tensor and isinstance(other, int | float):
                x.program.scale(x.register, other)
                return x
            if func is torch.ops.aten.add_.Tensor and isinstance(other, Symbol) and other.shape == x.shape:
                x.program.add(x.register, other.register)
                return x
        raise NotRecordable(str(func))


def supports(case: ShapeClass) -> str | None:
    if case.device != DEVICE:
        return "is for recordings"
    return native.supports(case._replace(device="cpu"))


def supports_attention(case: ShapeClass) -> str | None:
    return supports(case) or native.supports_attention(case._replace(device="cpu"))


# --- kernels: the signatures of ops/__init__.py --------------------------------------------------------------------------


def linear(x: Symbol, packed: Any) -> Symbol:
    out = Symbol.of(x.program, packed.out_features)
    x.program.linear(packed, x.register, out.register)
    return out


def rms_norm(x: Symbol, weight: Tensor, eps: float) -> Symbol:
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Symbol, residual: Symbol, weight: Tensor, eps: float) -> Symbol:
    return _norm(x, residual.register, weight, eps)


def _norm(x: Symbol, residual: int | None, weight: Tensor, eps: float) -> Symbol:
    out = Symbol.of(x.program, x.shape[-1])
    x.program.rms_norm(x.register, residual, weight, eps, out.register)
    return out


def layer_norm(x: Symbol, weight: Tensor | None, bias: Tensor | None, eps: float) -> Symbol:
    return _layer_norm(x, None, weight, bias, eps)


def add_layer_norm(x: Symbol, residual: Symbol, weight: Tensor | None, bias: Tensor | None, eps: float) -> Symbol:
    return _layer_norm(x, residual.register, weight, bias, eps)


def _layer_norm(x: Symbol, residual: int | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Symbol:
    out = Symbol.of(x.program, x.shape[-1])
    x.program.layer_norm(x.register, residual, weight, bias, eps, out.register)
    return out


def attend(
    qkv: Symbol, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    meta: AttentionMeta,
) -> Symbol:  # fmt: skip
    if not isinstance(positions, Symbol) or not isinstance(slots, Symbol) or slots.table is None:
        raise NotRecordable("attention to what is not of the step")
    out = Symbol.of(qkv.program, heads.num_heads * heads.head_size)
    shape = native.module.AttendShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, heads.scale, heads.window or 0, heads.softcap or 0.0
    )
    norms = heads.norms or (None, None)
    qkv.program.attend(
        qkv.register, out.register, shape, heads.cos_sin, *norms, heads.norm_eps, heads.sinks, k_cache, v_cache, slots.table
    )  # fmt: skip
    return out


def silu_mul(gate_up: Symbol) -> Symbol:
    return gated(gate_up, "silu")


def gated(gate_up: Symbol, activation: str) -> Symbol:
    out = Symbol.of(gate_up.program, gate_up.shape[1] // 2)
    gate_up.program.gated(gate_up.register, activation, out.register)
    return out


def activate(x: Symbol, activation: str) -> Symbol:
    out = Symbol.of(x.program, x.shape[1])
    x.program.activate(x.register, activation, out.register)
    return out


# --- recordings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSymbols:
    """What a recorded function is given in place of a step's tensors: residual [T, width] and positions [T]; slots [T] and
    metas, one of each block table."""

    residual: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]
    metas: tuple[AttentionMeta, ...]


class Recorder:
    """Makes one recording: of functions that each map what the last one added, [T, width] or None, and the step's tensors to
    what is to be added next, and may change the residual in place."""

    def __init__(self, width: int, num_tables: int, *, after: bool) -> None:
        """`after`: the first function is given what was added before it, not None."""
        self._program = native.module.Program()
        self._residual = Symbol.of(self._program, width)
        slots = tuple(Symbol.input(torch.int64, table) for table in range(num_tables))
        starts, lens, tables = (Symbol.input(torch.int32) for _ in range(3))
        meta = AttentionMeta(starts, lens, tables, max_query_len=1, max_context_len=1)
        self._step = StepSymbols(self._residual, Symbol.input(torch.int64), slots, (meta,) * num_tables)
        self._first = [Symbol.of(self._program, width)] if after else []
        self._last: Tensor | None = self._first[0] if after else None

    def add(self, function: Callable[[Tensor | None, StepSymbols], Tensor]) -> None:
        """Raises NotRecordable, and is then as before."""
        before = len(self._program)
        try:
            self._last = function(self._last, self._step)
        except (NotRecordable, RuntimeError) as error:  # torch's, where numbers are asked for
            self._program.truncate(before)
            raise NotRecordable(str(error)) from error

    def finish(self) -> Recording:
        out = self._last
        assert isinstance(out, Symbol)
        self._program.finish([symbol.register for symbol in (self._residual, *self._first, out)])
        return Recording(self._program)


class Recording:
    def __init__(self, program: Any) -> None:
        self._program = program

    def run(
        self, x: Tensor | None, residual: Tensor, positions: Tensor, slots: Sequence[Tensor],
        metas: Sequence[AttentionMeta],
    ) -> Tensor:  # fmt: skip
        """What the recorded functions do, one after the other, to x and residual [T, width]."""
        out = torch.empty_like(residual)
        tables = [
            (slot, meta.query_starts, meta.context_lens, meta.block_tables)
            for slot, meta in zip(slots, metas, strict=False)
        ]
        self._program.run([residual, out] if x is None else [residual, x, out], positions, tables)
        return out
