"""Caches that stand in for larger ones: kernels are chosen by what a cache holds, and a start tries them with a small one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_times: ContextVar[float] = ContextVar("times", default=1.0)


@contextmanager
def caches_stand_for(times: float) -> Iterator[None]:
    """On this thread, choose kernels as for caches `times` as large."""
    before = _times.set(times)
    try:
        yield
    finally:
        _times.reset(before)


def num_elements(cache: Tensor) -> float:
    """Return the number of elements of the cache that `cache` stands for."""
    return cache.numel() * _times.get()
