"""The C heap: memory brought near before a call that takes much of it and keeps the interpreter.

The system gives pages of fresh memory one at a time, when they are first written to: for 15 MB that is 10 ms, several times what
copying them takes. Where one call of Python writes all of it, nobody else moves meanwhile. Calls of C let others go on."""

from __future__ import annotations

import contextlib
import ctypes

MAX_BYTES = 31 << 20  # glibc's heap keeps no larger piece; it would be taken from the system anew
WORTHWHILE_BYTES = 1 << 20


def touch_heap(num_bytes: int) -> None:
    """Let so much memory be there for what the calling thread takes next."""
    if num_bytes < WORTHWHILE_BYTES:
        return
    num_bytes = min(num_bytes, MAX_BYTES)
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a system whose library cannot be called so
        libc = ctypes.CDLL(None)
        malloc, free, memset = libc.malloc, libc.free, libc.memset
        malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        free(malloc(num_bytes))  # that a piece of this size was given back tells glibc to keep the next one
        if piece := malloc(num_bytes):
            memset(piece, 0, num_bytes)
            free(piece)
