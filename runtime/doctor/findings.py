"""Findings about this machine's hardware and software for serving models. Each problem has a command that fixes it."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import torch

import ops
from runtime.doctor.what_fits import what_fits
from runtime.platform.cuda_topology import topology
from runtime.platform.host import free_host_bytes, has_nvidia_driver, num_cores, total_host_bytes
from runtime.weights.builtin import cache_folder
from runtime.weights.catalogue import BYTES_PER_PARAMETER

GIB = 1 << 30
FILES_WANTED = 4096
DISK_WANTED = 20 * GIB  # a model with 8 billion parameters in 16 bits, and a margin
_COPY_BYTES, _COPIES = 1 << 28, 5
_EXTRAS = (
    ("python_multipart", "python-multipart", "uploads for /v1/batches", "batches"),
    ("PIL", "pillow", "chats with pictures", "media"),
    ("av", "av", "chats with sounds and videos", "media"),
    ("matplotlib", "matplotlib", "pictures of `oneloop bench`", "bench"),
    ("opentelemetry", "opentelemetry", "traces (--otlp-traces-endpoint)", "otel"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. `state`: "missing" if it slows or prevents serving, "note" for information. `mend`: command that fixes
    the problem, or None."""

    topic: str
    text: str
    state: Literal["good", "note", "missing"] = "good"
    mend: str | None = None


def findings() -> dict[str, Any]:
    """Return all findings, the models that fit, and the kernels, as JSON data. Takes about a second to measure bandwidth."""
    found = [*_system(), *_devices(), *_links(), *_kernels(), *_packages(), *_limits()]
    return {"findings": [asdict(finding) for finding in found], **fits(), "kernels": ops.describe()}


def fits() -> dict[str, Any]:
    """Return the catalogue's models that fit in free memory, the free memory, and the measured bandwidth, as JSON data."""
    device = torch.cuda.is_available()
    memory = torch.cuda.mem_get_info()[0] if device else free_host_bytes()
    rate = memory_rate("cuda" if device else "cpu")
    return {
        "memory_bytes": memory,
        "memory_bytes_per_s": rate,
        "fits": [asdict(fit) for fit in what_fits(memory, rate, _formats() if device else None)],
    }


def _formats() -> frozenset[str] | None:
    """Return the weight formats that this GPU supports; None for all formats."""
    refusal = ops.linear_refusal([ops.WeightFormat("fp8")], torch.bfloat16, torch.device("cuda"))
    return None if refusal is None else frozenset(BYTES_PER_PARAMETER) - {"fp8"}


def memory_rate(device: str) -> float:
    """Return the memory bandwidth of `device` in bytes per second, from the fastest of several copies. Counts read and write."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_COPIES):
        _wait(device)
        began_s = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _COPY_BYTES / best_s


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _system() -> Iterator[Finding]:
    yield Finding("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    if sys.platform != "linux":
        yield Finding("system", "only Linux is tested", "note")
    yield Finding("processor", f"{_processor()}, {num_cores()} cores for this process")
    free, total = free_host_bytes(), total_host_bytes()
    yield Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _devices() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            major, minor = torch.cuda.get_device_capability(index)
            yield Finding("GPU", f"{name} (sm_{major}{minor}), {free / GIB:.1f} of {total / GIB:.1f} GiB are free")
    elif not has_nvidia_driver():
        yield Finding("GPU", "none: there is no NVIDIA driver here", "note")
    elif torch.version.cuda is None:
        mend = "pip install --force-reinstall torch"
        yield Finding("GPU", "there is a driver, but this build of torch has no CUDA", "missing", mend)
    else:
        yield Finding("GPU", "there is a driver, but torch finds no device: see nvidia-smi", "missing", "nvidia-smi")


def _links() -> Iterator[Finding]:
    """Yield findings about the links between GPUs."""
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num and (text := topology(range(num))):
        yield Finding("links", text)
    pairs = [*permutations(range(num), 2)]
    if not pairs:
        return
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        one, other = apart[0]
        text = f"between GPU {one} and GPU {other} use --data-parallel-size or --pipeline-parallel-size, not --tensor-parallel-size"
        yield Finding("links", text, "note")
        return
    rate = min(peer_rate(*pair) for pair in pairs)
    yield Finding("links", f"between any two of them {rate / 1e9:.0f} GB/s or more")


def peer_rate(source: int, target: int) -> float:
    """Return the bandwidth of copies between two CUDA devices, in bytes per second, from the fastest of several copies."""
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
    best_s = float("inf")
    for _ in range(_COPIES):
        for device in (source, target):
            torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        here.copy_(there)
        for device in (source, target):
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return _COPY_BYTES / best_s


def _kernels() -> Iterator[Finding]:
    if (isa := ops.native_isa()) is not None:
        yield Finding("CPU kernels", f"compiled, with {isa}")
    else:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        mend = "pip install --force-reinstall --no-deps oneloop"
        if compiler is None:
            mend = f"apt-get install g++ && {mend}"
        yield Finding("CPU kernels", "not compiled: torch computes everything, slower", "missing", mend)


def _packages() -> Iterator[Finding]:
    for name, what in (("torch", ""), ("transformers", "models without a description of our own"), ("triton", "GPUs")):
        try:
            yield Finding("packages", f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", f"{name} is not installed, which {what} need", "note", f"pip install {name}")
    for module, name, what, extra in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield Finding(
                "packages", f"{name} is not installed, which {what} need", "note", f"pip install 'oneloop[{extra}]'"
            )


def _limits() -> Iterator[Finding]:
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"models are kept in {folder}, where {free / GIB:.0f} GiB are free"
    yield Finding("disk", text, "good" if free >= DISK_WANTED else "note")
    if not os.access(there, os.W_OK):
        yield Finding("disk", f"{there} cannot be written to", "missing", "export XDG_CACHE_HOME=/somewhere/else")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_WANTED:
        text = f"this process may open {hard} files, and a connection is one"
        yield Finding("connections", text, "note", f"ulimit -n {FILES_WANTED}")
