"""Start of the ops on a device: number of threads, and compilation before the first real step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ops import native
from ops.cuda import program
from ops.registry import forced


def compile_ahead(device: torch.device, dtype: torch.dtype) -> None:
    """Begin to compile what this dtype needs on a CUDA device, beside whatever else start-up does."""
    if device.type == "cuda":
        from ops.attention import cuda as decode  # which no CPU needs

        decode.program_of(device)  # from now on among those that are compiled
        program.compile_ahead(dtype, device)
        threading.Thread(target=_prepare_triton, args=(device,), name="oneloop-triton", daemon=True).start()


def _prepare_triton(device: torch.device) -> None:
    from ops import compiling  # imports Triton

    compiling.prepare(device)


@contextmanager
def compile_together(device: torch.device) -> Iterator[None]:
    """Steps run inside compute nothing of use: kernels that are not compiled yet only begin to be, all at a time; when it ends
    they are."""
    if device.type != "cuda":
        yield
        return
    from ops.compiling import compile_together as together  # imports Triton

    with together(device):
        yield


def native_isa() -> str | None:
    """The instruction set that the compiled CPU kernels compute with; None where they are not compiled."""
    return native.about if native.module is not None else None


def set_num_threads(n: int) -> None:
    """Threads that one op may use, the calling one included.

    With the native kernels torch itself keeps to one thread: what is left to it is small, and its OpenMP threads would
    spin on the cores that ours need."""
    if n < 1:
        raise ValueError(f"at least one thread is needed, not {n}")
    if native.module is not None and forced() != "reference":
        native.module.set_num_threads(n)
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(n)
