"""Launch of Triton kernels: from several threads, and overlapped with the previous kernel where the device supports it.

Under programmatic dependent launch (Hopper and newer) a kernel may start while those before it still run. So it waits before it
touches anything that another kernel writes; only weights, and what earlier steps left, may be read before. Knows nothing of any
operation.

Triton does not expect two threads to launch a kernel for the first time. Importing this file replaces the two functions of Triton
that rely on it: `_load_module` and `_loaded_run` say why."""

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
    """Load the C extension at `path` by `load`, and return a module that no other extension called `name` shares.

    Triton up to 3.6 calls every kernel's launcher `__triton_launcher`. CPython keeps one module object a name for extensions
    of this form (single-phase initialisation): loading a file again writes its functions into the module that was loaded last,
    which another thread may be about to read. The launcher it then finds packs another kernel's arguments."""
    with _loading:
        shared = load(name, path)
        own = ModuleType(name)
        vars(own).update(vars(shared))
    return own


def _loaded_run(kernel: CompiledKernel) -> Any:
    """Return the launcher of `kernel`, loading its machine code first.

    Triton's own property returns the launcher while another thread is still loading the machine code, and the launch fails for
    want of a function."""
    if kernel.function is None:
        with vars(kernel).setdefault("_oneloop_loading", threading.Lock()):
            kernel._init_handles()
    return kernel._run


build._load_module_from_path = functools.partial(_load_module, build._load_module_from_path)
CompiledKernel.run = property(_loaded_run)


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Arguments for a launch of a kernel that calls `wait_for_previous(PDL)`; a CUDA device of capability 9 overlaps."""
    if device.type != "cuda" or INTERPRETED or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    # The next kernel may start at once: its own wait is for this one to end, which is after those before.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
