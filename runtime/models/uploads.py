"""Uploads of checkpoint data to a CUDA device, on the threads that read files, through reused pinned buffers.

A new array would cost a page fault per 4 KiB, and a copy from pageable memory uses one thread. Here each thread reads a piece into
its pinned buffer, starts the copy, and reads the next piece."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

_SLAB_BYTES = 8 << 20  # one per reading thread
_MIN_BYTES = 1 << 20  # smaller parameters gain nothing
_PORTABLE = 1  # cudaHostRegisterPortable: for any device


class Uploads:
    """Context manager with pinned buffers, which are freed at its end. Call `begin` for a parameter on the thread that will use
    it."""

    def __init__(self, device: torch.device) -> None:
        # New threads use the first device, whichever is this thread's.
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._slabs: list[_Slab] = []
        self._free: list[_Slab] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for slab in self._slabs:
            slab.close()

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceUpload | None:
        """Begin the upload of a parameter. Return None if it is too small for an upload, or if one row exceeds the buffer."""
        row_bytes = prod(shape[1:]) * dtype.itemsize
        if shape[0] * row_bytes < _MIN_BYTES or row_bytes > _SLAB_BYTES:
            return None
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))  # its memory may still be in use by earlier work
        return DeviceUpload(self, whole, ready, _SLAB_BYTES // row_bytes)

    def take(self) -> _Slab:
        with self._lock:
            if self._free:
                return self._free.pop()
        slab = _Slab(self._device)
        with self._lock:
            self._slabs.append(slab)
        return slab

    def give(self, slab: _Slab) -> None:
        with self._lock:
            self._free.append(slab)


class DeviceUpload:
    """Upload of one parameter, an implementation of `rules.Destination`."""

    def __init__(self, uploads: Uploads, whole: Tensor, ready: torch.cuda.Event, max_rows: int) -> None:
        self._uploads, self.whole, self._ready, self.max_rows = uploads, whole, ready, max_rows

    @contextmanager
    def rows(self, start: int, stop: int) -> Iterator[Any]:
        slab = self._uploads.take()
        try:
            with torch.inference_mode(), torch.cuda.stream(slab.stream):
                into = self.whole[start:stop]
                numbers = slab.bytes[: into.nbytes].view(into.dtype).view(into.shape)
                yield (numbers.view(torch.uint16) if into.dtype == torch.bfloat16 else numbers).numpy()
                slab.stream.wait_event(self._ready)
                into.copy_(numbers)  # blocks until the copy is done
        finally:
            self._uploads.give(slab)


class _Slab:
    def __init__(self, device: torch.device) -> None:
        self._memory = mmap.mmap(-1, _SLAB_BYTES)
        self.bytes = torch.from_numpy(np.frombuffer(self._memory, np.uint8))
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = self._runtime.cudaHostRegister(self.bytes.data_ptr(), _SLAB_BYTES, _PORTABLE)
        # If the system refuses to lock this much memory, copies are correct but slower.
        self._is_locked = int(status) == 0

    def close(self) -> None:
        if self._is_locked:
            self._runtime.cudaHostUnregister(self.bytes.data_ptr())
