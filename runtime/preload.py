"""Preload: loads torch's shared libraries and creates a GPU context on threads, while Python imports modules.

The dynamic linker takes a fifth of torch's import, and would hold the GIL. It loads one library at a time, and a thread that
waits for it keeps the GIL, so preloading starts at a point where no other library is loaded for a while. Errors are left to
the import, which reports the reason."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any


def preload_torch() -> threading.Thread | None:
    """Start the preloading thread and return it, or None if there is nothing to load. It need not be joined."""
    import numpy  # noqa: F401  # torch needs it and it has libraries of its own, see above

    libraries = _libraries()
    if libraries is None:
        return None
    library = libraries / "libtorch.so"  # all large libraries are its dependencies
    thread = threading.Thread(target=_load, args=(library,), name="oneloop-preload", daemon=True)
    thread.start()
    return thread


def preload_device() -> threading.Thread | None:
    """Start a thread that creates the CUDA context of the first NVIDIA GPU, and return it. None if torch has no CUDA
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
    """Create a CUDA context. `open_driver` opens the driver's library by name."""
    try:
        driver = open_driver("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # as the CUDA runtime does; never released
