"""Start-up of the ops on a device: the number of threads, and compilation before the first real step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ops import native
from ops.cuda import program
from ops.registry import forced


def compile_ahead(device: torch.device, dtype: torch.dtype) -> None:
    """Start compiling the kernels that `dtype` needs on a CUDA device, in parallel with the rest of start-up."""
    if device.type == "cuda":
        from ops.attention import cuda as decode  # not needed on CPUs

        decode.program_of(device)  # includes it in the compilation from now on
        program.compile_ahead(dtype, device)
        threading.Thread(target=_prepare_triton, args=(device,), name="oneloop-triton", daemon=True).start()


def _prepare_triton(device: torch.device) -> None:
    from ops import compiling  # imports Triton

    compiling.prepare(device)


@contextmanager
def compile_together(device: torch.device) -> Iterator[None]:
    """Context manager that compiles the kernels of steps run inside in parallel, and waits for them at its end. Results of these
    steps are meaningless."""
    if device.type != "cuda":
        yield
        return
    from ops.compiling import compile_together as together  # imports Triton

    with together(device):
        yield


def native_isa() -> str | None:
    """Return the instruction set of the compiled CPU kernels, or None without them."""
    return native.about if native.module is not None else None


def set_num_threads(n: int) -> None:
    """Set the number of threads of an op, including the calling thread. With the native kernels, torch is limited to one thread: it
    computes little, and its OpenMP threads would spin on the cores of the native kernels."""
    if n < 1:
        raise ValueError(f"at least one thread is needed, not {n}")
    if native.module is not None and forced() != "reference":
        native.module.set_num_threads(n)
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(n)
