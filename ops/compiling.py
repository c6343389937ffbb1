"""Parallel compilation of the Triton kernels that a start needs. Without it, each is compiled at its first launch, one after
another.

Inside `compile_together`, the launch of an uncompiled kernel starts its compilation on a thread and launches nothing. Results
inside are therefore meaningless. Uninitialised memory is zeros, which every op accepts as ids, counts and indices. This module is
independent of ops."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime import cache

from ops import launch  # noqa: F401 - the threads below need its loading of kernels

_COMPILERS = 8  # parallel compilations; most of the work is Python, which holds the GIL
_UNINITIALISED = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


_inside = threading.Lock()
_preparing = threading.Lock()


def prepare(device: torch.device) -> None:
    """Prepare Triton before its first kernel: compute its hash of itself (half a gigabyte) once instead of on each thread. This
    mostly runs without the GIL."""
    torch.cuda.set_device(device)
    with _preparing:
        if (sum_up := getattr(cache, "triton_key", None)) is not None:  # cached by Triton
            sum_up()
        triton.runtime.driver.active.get_current_target()


class _Zeros(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _UNINITIALISED else out


@contextmanager
def compile_together(device: torch.device) -> Iterator[None]:
    """Context manager that compiles all kernels launched inside in parallel, and waits for them at its end. A compile error is
    raised at the kernel's first real launch. If another thread is inside, kernels are launched and compiled as usual."""
    if not _inside.acquire(blocking=False):
        yield
        return
    try:
        yield from _compiled_together(device)
    finally:
        _inside.release()


def _load(function: Any, specialization: str) -> None:
    """Compile the kernel, or find it in the cache, and load its machine code on the device."""
    kernel = function.preload(specialization)
    getattr(kernel, "run", None)  # a property with side effects


def _compiled_together(device: torch.device) -> Iterator[None]:
    here, begun = threading.get_ident(), set[tuple[str, str, str]]()

    def begin(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        if threading.get_ident() != here:
            return False  # one of the threads below, which must compile it
        if (fn.module, fn.name, key) not in begun:
            begun.add((fn.module, fn.name, key))
            threads.submit(_load, fn.jit_function, compile["specialization_data"])
        return True

    num_threads = min(_COMPILERS, len(os.sched_getaffinity(0)))
    threads = ThreadPoolExecutor(num_threads, "oneloop-triton", prepare, (device,))
    with threads, _Zeros(), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = begin
        yield
