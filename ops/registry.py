"""Choice of each op's kernel, made once per shape class, stored, and reported.

A kernel's `supports` returns why it does not support a shape class, or None. The first supporting kernel is chosen, so an op lists
the fastest first and its torch reference last. The registry is independent of tensors and backends."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ops.stored import WeightFormat

logger = logging.getLogger("oneloop.ops")


class ShapeClass(NamedTuple):
    """Properties of arguments on which the choice of a kernel may depend. All other properties may change from call to call.

    `head_size` 0, `kv_dtype` None: the op has none. `weight`: formats of the weight's rows; empty for ops without a weight.
    `capability`: compute capability of a CUDA device, else None; kernels of oneloop_native choose an instruction set themselves.
    `mask`: attention mask, see ops/attention/heads.py."""

    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    head_size: int = 0
    weight: tuple[WeightFormat, ...] = ()
    mask: str = "causal"
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        words = [_short(self.dtype), f"on {self.device}"]
        if self.head_size:
            words.append(f"head size {self.head_size}")
        if self.kv_dtype is not None:
            words.append(f"{_short(self.kv_dtype)} cache")
        if self.mask != "causal":
            words.append(f"mask {self.mask}")
        if any(each.dtype != self.dtype for each in self.weight):
            words.append(f"weights in {' and '.join(map(str, self.weight))}")
        return ", ".join([" ".join(words[:2]), *words[2:]])


USUAL = ShapeClass("cpu", torch.float32)  # the case that an op describes if no choice was made
USUAL_ATTENTION = ShapeClass("cpu", torch.float32, torch.float32, 64)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Implementation of an op. `supports`: returns why the kernel does not support a shape class, or None. `about`: note for
    users. `run`: the function, or "module:function", which is imported when the kernel is first chosen. A CPU therefore needs no
    Triton."""

    op: str
    name: str
    supports: Callable[[ShapeClass], str | None]
    run: Callable[..., Any] | str
    about: str = ""


class _Choices(dict[tuple[Any, ...], Callable[..., Any]]):
    """Chosen function by (device, dtype, ...). Every call of a shape class but the first is a plain dict lookup. A step makes about
    300 calls; creating a ShapeClass for each would take longer than a small kernel."""

    def __init__(self, decide: Callable[[ShapeClass], Callable[..., Any]]) -> None:
        super().__init__()
        self._decide = decide

    def __missing__(self, facts: tuple[Any, ...]) -> Callable[..., Any]:
        case = ShapeClass(facts[0].type, *facts[1:])
        run = self[facts] = self._decide(case._replace(capability=capability(facts[0])))
        return run


class Op:
    """Kernels of one op, fastest first, and the choices made so far.

    `runs[device, dtype]` is the function to call, or `runs[device, dtype, kv_dtype, head_size]` if the op has these. For
    preparing weights it is `runs[device, dtype, None, 0, formats]`, and for attention `runs[device, dtype, kv_dtype, head_size,
    (), mask]`."""

    def __init__(self, name: str, usual: ShapeClass, kernels: Sequence[Kernel], traced: Kernel | None = None) -> None:
        """Create an op. `traced`: the kernel that records the op while a stack is traced; its choices are not listed."""
        self.name = name
        self.kernels = tuple(kernels)
        self._traced = traced
        self.runs = _Choices(self.choose)
        self._usual = usual
        self._reasons: dict[ShapeClass, str] = {}
        _ops.append(self)

    def describe(self, *, usual: bool = True) -> list[str]:
        """Return one line per choice made. If there is none and `usual` is set, make and describe the choice for the usual case."""
        if not self._reasons and usual:
            self.choose(self._usual)
        return [f"{self.name}: {reason} ({case})" for case, reason in self._reasons.items()]

    def forget(self) -> None:
        self.runs.clear()
        self._reasons.clear()

    def refusal(self, case: ShapeClass) -> str | None:
        """Return why no kernel supports `case`, or None if a kernel supports it. This records no choice."""
        only = self._only()
        refusals = [kernel.supports(case) for kernel in self.kernels if only in (None, kernel.name)]
        return None if None in refusals else "; ".join(why for why in refusals if why is not None)

    def _only(self) -> str | None:
        """Return the name of the kernels that `force` allows, if this op has one."""
        only = _forced.get(self.name) or _forced.get(None)
        return only if only in {kernel.name for kernel in self.kernels} else None

    def choose(self, case: ShapeClass) -> Callable[..., Any]:
        """Return the function of the first kernel that supports `case`. Raises NotImplementedError if none does."""
        if self._traced is not None and self._traced.supports(case) is None:
            return _resolve(self._traced.run)
        refusals: list[str] = []
        only = self._only()
        for kernel in self.kernels:
            if only is not None and kernel.name != only:
                refusal: str | None = f"{only} was asked for"
            else:
                refusal = kernel.supports(case)
            if refusal is None:
                name = f"{kernel.name} {kernel.about}".rstrip()
                reason = "; ".join([name, *refusals])
                self._reasons[case] = reason
                logger.debug("%s: %s (%s)", self.name, reason, case)
                return _resolve(kernel.run)
            refusals.append(f"not {kernel.name}: {refusal}")
        raise NotImplementedError(f"{self.name}: no kernel for {case} ({'; '.join(refusals)})")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for other devices, or without CUDA."""
    known = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if known else None


def _resolve(run: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(run, str):
        return run
    module, _, function = run.partition(":")
    module = re.sub(r"^ops\b", __package__, module)  # the installed package name
    resolved: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return resolved


def force(name: str | None, op: str | None = None) -> None:
    """Use only kernels called `name` ("reference", "native") from now on, in `op` or in all ops that have such a kernel. None
    restores the normal choice. A LinearWeight that was already prepared keeps its form."""
    known = {kernel.name for each in _ops for kernel in each.kernels if op in (None, each.name)}
    if name is not None and name not in known:
        raise ValueError(f"no kernel is called {name!r}")
    if name is None:
        _forced.pop(op, None)
    else:
        _forced[op] = name
    for each in _ops:
        each.forget()


def forced() -> str | None:
    """Return the kernel name that `force` set for all ops."""
    return _forced.get(None)


def describe(*, usual: bool = True) -> list[str]:
    """Return a line per op and shape class: the chosen kernel, and why earlier ones were not. With `usual`, an op without a
    choice reports its usual one."""
    return [line for op in _ops for line in op.describe(usual=usual)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ops: list[Op] = []
_forced: dict[str | None, str] = {}  # by op; None: all
