"""Free memory and number of cores of the host, as limited by the process's cgroup."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def free_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, but at most what the cgroup's limit leaves."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else 8 << 30
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def total_host_bytes() -> int:
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    return int(fields["MemTotal"].split()[0]) * 1024 if "MemTotal" in fields else free_host_bytes()


def num_cores() -> int:
    """Return the number of cores that this process may use (Linux), or the number of all cores on other systems."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_nvidia_driver() -> bool:
    """Return True if an NVIDIA driver is installed. There may still be no usable device."""
    import ctypes  # most starts do not need it

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def trim_heap() -> None:
    """Return unused heap memory to the operating system. malloc would otherwise keep it for each thread."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
