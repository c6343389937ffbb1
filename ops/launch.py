"""Launch of Triton kernels from several threads, overlapped with the previous kernel if the device supports it.

With programmatic dependent launch (Hopper and newer), a kernel may start while earlier ones still run. It must therefore wait
before it accesses data that another kernel writes. Only weights and results of earlier steps may be read before. This module is
independent of ops.

Triton does not support concurrent first launches of a kernel by two threads. Importing this file replaces two functions of Triton;
`_load_module` and `_loaded_run` explain why."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import build

INTERPRETED = triton.knobs.runtime.interpret

_loading = threading.Lock()


def _load_module(load: Callable[[str, str], ModuleType], name: str, path: str) -> ModuleType:
    """Load the C extension at `path` with `load`, and return a module that is not shared with other extensions called `name`.

    Triton up to 3.6 calls every kernel's launcher `__triton_launcher`. CPython has one module object per name for extensions
    with single-phase initialisation: loading another file overwrites the functions in the module that was loaded before,
    which another thread may be about to read. The launcher that it finds then packs another kernel's arguments."""
    with _loading:
        shared = load(name, path)
        own = ModuleType(name)
        vars(own).update(vars(shared))
    return own


def _loaded_run(kernel: CompiledKernel) -> Any:
    """Return the launcher of `kernel`, loading its machine code first.

    Triton's own property returns the launcher while another thread is still loading the machine code, and the launch fails
    because the function is missing."""
    if kernel.function is None:
        with vars(kernel).setdefault("_oneloop_loading", threading.Lock()):
            kernel._init_handles()
    return kernel._run


build._load_module_from_path = functools.partial(_load_module, build._load_module_from_path)
CompiledKernel.run = property(_loaded_run)


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Return launch arguments for a kernel that calls `wait_for_previous(PDL)`. Kernels overlap from compute capability 9.0 on."""
    if device.type != "cuda" or INTERPRETED or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    # The next kernel may start at once: it waits for the end of this one, which is after all earlier ones.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
