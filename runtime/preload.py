"""Preloading of torch's shared libraries and creation of a GPU context, on threads, while Python imports modules.

Loading the libraries takes a fifth of torch's import time and would hold the GIL. The dynamic linker loads one library at a
time, and a thread that waits for it keeps the GIL. Preloading therefore starts when no other library is loaded for a while.
Errors are ignored here; the later import reports them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any


def preload_torch() -> threading.Thread | None:
    """Start a thread that loads torch's libraries. Return it, or None if there are none. Joining it is not necessary."""
    import numpy  # noqa: F401  # torch needs it and it has libraries of its own, see above

    libraries = _libraries()
    if libraries is None:
        return None
    library = libraries / "libtorch.so"  # all large libraries are its dependencies
    thread = threading.Thread(target=_load, args=(library,), name="oneloop-preload", daemon=True)
    thread.start()
    return thread


def preload_device() -> threading.Thread | None:
    """Start a thread that creates the CUDA context of the first NVIDIA GPU. Return the thread, or None if torch has no CUDA
    libraries."""
    libraries = _libraries()
    if libraries is None or not (libraries / "libtorch_cuda.so").exists():
        return None
    thread = threading.Thread(target=_begin_context, name="oneloop-context", daemon=True)
    thread.start()
    return thread


def _libraries() -> Path | None:
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).parent / "lib"


def _load(library: Path) -> None:
    # A foreign call releases the GIL. Before Python 3.12, ctypes.CDLL(library) would hold it.
    ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)


def _begin_context(open_driver: Any = ctypes.CDLL) -> None:
    """Create a CUDA context on the first GPU. `open_driver` opens a shared library by name."""
    try:
        driver = open_driver("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # as the CUDA runtime does; never released
