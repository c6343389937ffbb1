"""Recording of norms as calls of a traced stack."""

from __future__ import annotations

from torch import Tensor

from ops.symbols import Symbol


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
