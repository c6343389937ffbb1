"""oneloop_native, the compiled CPU kernels, if this installation has them.

They are missing if no C++ compiler was available at installation; torch references then compute everything. The environment
variable ONELOOP_ISA selects an instruction set of `oneloop_native.isas()` (avx512vnni, avx512, avxvnni, avx2, portable) instead of
the processor's fastest, for tests and measurements. Other values are an error."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from ops.registry import ShapeClass

try:
    import oneloop_native

    module: Any = oneloop_native
    about: str = oneloop_native.isa()
    missing: str | None = None
except ImportError as error:
    module, about = None, ""
    logging.getLogger("oneloop.ops").warning("native CPU kernels are not built: torch computes everything, slower")
    missing = f"oneloop_native is not built ({error}); reinstall oneloop with a C++ compiler at hand"


def choose_isa(name: str) -> None:
    """Use the instruction set `name` from now on. Raises ValueError if this processor or installation does not support it."""
    global about
    known = module.isas() if module is not None else []
    if name not in known:
        raise ValueError(f"ONELOOP_ISA={name}: the compiled CPU kernels here are for {', '.join(known) or 'nothing'}")
    module.set_isa(name)
    about = module.isa()


if "ONELOOP_ISA" in os.environ:
    choose_isa(os.environ["ONELOOP_ISA"])

CACHE_TYPES = frozenset({torch.float32, torch.bfloat16, torch.int8})


def supports(case: ShapeClass) -> str | None:
    """Return why the compiled CPU kernels do not support `case`, or None. They compute in float32, with a float32, bfloat16 or int8
    cache."""
    if missing is not None:
        return missing
    if case.device != "cpu":
        return "computes on the CPU only"
    if case.dtype != torch.float32:
        return "computes in float32 only"
    if case.kv_dtype is not None and case.kv_dtype not in CACHE_TYPES:
        return f"reads no {case.kv_dtype} caches".replace("torch.", "")
    return None


def supports_attention(case: ShapeClass) -> str | None:
    return supports(case) or ("takes head sizes that are multiples of 8" if case.head_size % 8 else None)
