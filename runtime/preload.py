"""Preload: torch's shared libraries, mapped and bound on a thread while Python imports what is Python.

A fifth of importing torch is the dynamic linker's work, which needs no interpreter but would hold it. The linker takes one library
after the other and whoever else has one to load waits for it holding the interpreter, so this belongs where that is over for a
while. What cannot be loaded is left to the import, which says why."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from pathlib import Path


def preload_torch() -> threading.Thread | None:
    """The thread that does it, begun; None where there is nothing to load. Nobody needs to wait for it."""
    import numpy  # noqa: F401  # torch imports it and it has libraries of its own: see above

    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "lib" / "libtorch.so"  # its dependencies are all that is large
    thread = threading.Thread(target=_load, args=(library,), name="oneloop-preload", daemon=True)
    thread.start()
    return thread


def _load(library: Path) -> None:
    # A foreign call leaves the interpreter to others; ctypes.CDLL(library) would hold it, before Python 3.12.
    ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)
