"""Recording CUDA graphs: on which stream, and without garbage collection, which could free what belongs to a graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any

import torch


def capture_stream() -> torch.cuda.Stream:
    """Return the current device's stream for captures, one for as long as the process lives.

    cuBLAS keeps a workspace, 32 MiB on Hopper, for every stream that it has computed on. With a stream for each capture, three
    models that were swapped on an H200 took 32 MiB more with each swap. Its priority is that of a `SideStream`: with a higher
    one, an image's first token took four times as long beside one stream of decodes."""
    return _of_device(torch.cuda.current_device())


@cache
def _of_device(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


class Uncollected:
    """A block without garbage collection, for any number of threads."""

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
        """Collect first, unless a thread is inside already: garbage may hold memory of the device that captures need."""
        with self._lock:
            if not self._inside:
                gc.collect()
        with self:
            yield


UNCOLLECTED = Uncollected()


@contextmanager
def recording(graph: Any, memory: Any, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Record in `graph` what is enqueued inside, on `stream` or the current one, with memory of the pool `memory`.

    Unlike `torch.cuda.graph`, this does not wait for all that the device does."""
    with UNCOLLECTED, nullcontext() if stream is None else torch.cuda.stream(stream):
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
