"""Description of how CUDA devices are connected: access to each other's memory, and links (PCIe and NVLink).

The driver's management library (NVML) provides the links. Without NVML, no links are reported."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch

_MAX_NVLINKS = 18  # maximum of any device so far


class Links(NamedTuple):
    """Links of one GPU. `pcie`: PCIe generation and number of lanes, or None. `num_nvlinks`: number of active NVLinks."""

    pcie: tuple[int, int] | None = None
    num_nvlinks: int = 0

    def __str__(self) -> str:
        nvlinks = f"{self.num_nvlinks} NVLinks" if self.num_nvlinks > 1 else "1 NVLink" if self.num_nvlinks else ""
        pcie = "" if self.pcie is None else "PCIe {} x{}".format(*self.pcie)
        return ", ".join(filter(None, (nvlinks, pcie)))


def topology(devices: Sequence[int]) -> str:
    """Return a one-line description of the connections between `devices`, or "" if unknown."""
    return described(devices, links_of(devices), torch.cuda.can_device_access_peer)


def described(devices: Sequence[int], links: Sequence[Links], reaches: Callable[[int, int], bool]) -> str:
    """Describe the connections. `links`: links of each device. `reaches(a, b)`: True if device a can access b's memory."""
    parts = []
    pairs = [*permutations(devices, 2)]
    apart = [pair for pair in pairs if not reaches(*pair)]
    if apart:
        one, other = apart[0]
        parts.append(
            f"GPU {one} does not reach the memory of GPU {other}"
            + (f", and so {len(apart)} of {len(pairs)} ways" if len(apart) > 1 else "")
        )
    elif pairs:
        parts.append(f"all {len(devices)} GPUs reach each other's memory")
    (usual, _), *_ = Counter(links).most_common() or [(Links(), 0)]
    if str(usual):
        parts.append(f"{usual} each" if len(devices) > 1 else str(usual))
    parts += [
        f"GPU {device}: {each or 'nothing known'}" for device, each in zip(devices, links, strict=True) if each != usual
    ]
    return "; ".join(parts)


def links_of(devices: Sequence[int]) -> list[Links]:
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return [Links()] * len(devices)
    if nvml.nvmlInit_v2():
        return [Links()] * len(devices)
    try:
        return [_links(nvml, device) for device in devices]
    finally:
        nvml.nvmlShutdown()


def _links(nvml: Any, device: int) -> Links:
    found: Any = torch.cuda.get_device_properties(device)
    handle = ctypes.c_void_p()
    place = f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0".encode()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)):
        return Links()

    def number(ask: Callable[..., int], *more: object) -> int:
        value = ctypes.c_uint(0)
        return 0 if ask(handle, *more, ctypes.byref(value)) else value.value

    # An idle link switches to the first generation, so the maximum that both ends support is read.
    pcie = number(nvml.nvmlDeviceGetMaxPcieLinkGeneration), number(nvml.nvmlDeviceGetCurrPcieLinkWidth)
    nvlinks = sum(number(nvml.nvmlDeviceGetNvLinkState, ctypes.c_uint(link)) for link in range(_MAX_NVLINKS))
    return Links(pcie if all(pcie) else None, nvlinks)
