"""Factories of kernels and ops for the usual backends. Each op lists its own kernels, fastest first.

A tracing kernel records the op instead of computing it (symbols.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops import native as cpu
from ops import symbols
from ops.registry import USUAL, Kernel, Op, ShapeClass

Supports = Callable[[ShapeClass], str | None]


def anywhere(case: ShapeClass) -> str | None:
    return None


def on_cuda_at_any_size(case: ShapeClass) -> str | None:
    return None if case.device == "cuda" else f"it runs on CUDA, not on {case.device}"


def on_cuda(case: ShapeClass) -> str | None:
    return on_cuda_at_any_size(case) or (None if case.head_size <= 256 else "it serves head sizes up to 256")


def native(op: str, run: Callable[..., Any], supports: Supports = cpu.supports) -> Kernel:
    return Kernel(op, "native", supports, run, cpu.about)


def triton(op: str, run: str, supports: Supports = on_cuda) -> Kernel:
    """Return a Triton kernel of `op`. `run`: "module:function", which is imported when the kernel is first chosen."""
    return Kernel(op, "triton", supports, run)


def reference(op: str, run: Callable[..., Any], about: str = "") -> Kernel:
    return Kernel(op, "reference", anywhere, run, about)


def traced(op: str, run: Callable[..., Any], supports: Supports = cpu.supports) -> Kernel:
    """Return the kernel that records `op` while a stack is traced. `supports`: check whether the native kernel supports a shape
    class."""

    def on_symbols(case: ShapeClass) -> str | None:
        if case.device != symbols.DEVICE:
            return "is for tracing"
        return supports(case._replace(device="cpu"))

    return Kernel(op, "traced", on_symbols, run)


def everywhere(
    op: str, native_run: Callable[..., Any], triton_run: str, reference_run: Callable[..., Any],
    traced_run: Callable[..., Any],
) -> Op:  # fmt: skip
    """Return an op with kernels for every backend and for tracing."""
    kernels = [native(op, native_run), triton(op, triton_run), reference(op, reference_run)]
    return Op(op, USUAL, kernels, traced(op, traced_run))


def on_gpus(op: str, triton_run: str, reference_run: Callable[..., Any]) -> Op:
    """Return an op with Triton and reference kernels, without a compiled CPU kernel."""
    return Op(op, USUAL, [triton(op, triton_run, on_cuda_at_any_size), reference(op, reference_run)])
