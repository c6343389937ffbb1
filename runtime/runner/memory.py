"""Memory: how much of it this process may still take, as the kernel and its cgroup tell."""

from __future__ import annotations

from pathlib import Path


def free_host_bytes() -> int:
    """Bytes that can be allocated without swapping, or the rest of the cgroup's limit if that is less."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else 8 << 30
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
