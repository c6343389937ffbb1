"""Recording of activations as calls of a traced stack."""

from __future__ import annotations

from ops.symbols import Symbol


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
