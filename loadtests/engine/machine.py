"""Facts about the machine for a record: memory and age of this process, device name, versions."""

from __future__ import annotations

import contextlib
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.platform.platform import choose_platform


def status_mib(name: str) -> float:
    """Return `name`, VmRSS or VmHWM, of this process in MiB. getrusage would report the parent's peak."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def process_age_s() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def device_facts(device: str) -> dict[str, str]:
    import torch

    name = choose_platform(device.partition(":")[0]).describe()
    facts = {"device": device, "device_name": name, "torch": torch.__version__}
    with contextlib.suppress(PackageNotFoundError):
        facts["triton"] = version("triton")
    return facts
