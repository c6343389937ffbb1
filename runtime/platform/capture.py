"""Capture of CUDA graphs: provides the stream, and disables garbage collection, which could free memory of a graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any

import torch


def capture_stream() -> torch.cuda.Stream:
    """Return the stream for captures on the current device. It is the same stream for the life of the process.

    cuBLAS keeps a workspace, 32 MiB on Hopper, for every stream that it has computed on. With a new stream per capture,
    swapping three models on an H200 took 32 MiB more with each swap. The stream has the priority of a `SideStream`. With a
    higher priority, the first token of a prompt with an image took four times as long while other sequences decoded."""
    return _of_device(torch.cuda.current_device())


@cache
def _of_device(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


class Uncollected:
    """Context manager that disables garbage collection while at least one thread is inside."""

    def __init__(self) -> None:
        self._lock, self._inside, self._was_enabled = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()

    @contextmanager
    def after_collecting(self) -> Iterator[None]:
        """Return a context manager that collects garbage first, to free device memory, unless another thread is already inside."""
        with self._lock:
            if not self._inside:
                gc.collect()
        with self:
            yield


UNCOLLECTED = Uncollected()


@contextmanager
def recording(graph: Any, memory: Any, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Return a context manager that captures enqueued work in `graph`. `memory`: memory pool. `stream`: None is the current one.

    Unlike `torch.cuda.graph`, this does not wait for other work of the device."""
    with UNCOLLECTED, nullcontext() if stream is None else torch.cuda.stream(stream):
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
