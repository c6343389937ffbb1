"""What `oneloop doctor` finds: true of this machine, and arithmetic."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import ops
from runtime.doctor import findings as room
from runtime.doctor.what_fits import MIN_KV_TOKENS, what_fits
from runtime.platform import cuda_topology
from runtime.weights.catalogue import catalogue

GIB = 1 << 30


def test_findings_are_of_this_machine_and_fit_into_json():
    found = json.loads(json.dumps(room.findings()))
    by_topic = {finding["topic"]: finding for finding in found["findings"]}
    assert torch.__version__ in " ".join(f["text"] for f in found["findings"] if f["topic"] == "packages")
    assert (by_topic["CPU kernels"]["state"] == "good") == (ops.native_isa() is not None)
    assert (by_topic["GPU"]["state"] == "good") == torch.cuda.is_available()
    assert found["memory_bytes_per_s"] > 0
    assert any(line.startswith("linear: ") for line in found["kernels"])
    assert all(finding["mend"] for finding in found["findings"] if finding["state"] == "missing")


@pytest.mark.parametrize(("compiler", "command"), [(None, "apt-get install g++"), ("/usr/bin/c++", "pip install")])
def test_kernels_that_are_not_compiled_are_missing_and_a_compiler_too(monkeypatch, compiler, command):
    monkeypatch.setattr(ops, "native_isa", lambda: None)
    monkeypatch.setattr(room.shutil, "which", lambda name: compiler)
    [finding] = room._kernels()
    assert (finding.state, finding.mend.startswith(command)) == ("missing", True)


def test_a_driver_without_a_torch_for_it_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(room, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    [finding] = room._devices()
    assert (finding.state, finding.mend) == ("missing", "pip install --force-reinstall torch")


def test_what_fits_is_arithmetic():
    fits = {fit.model: fit for fit in what_fits(20 * GIB, 100e9, frozenset({"bf16", "q4_k_m"}))}
    assert len(fits) == len(catalogue())
    llama = fits["llama-3.1-8b"]
    assert (llama.format, llama.weights_bytes, llama.fits) == ("bf16", 16_060_000_000, True)
    assert llama.kv_tokens == (int(18 * GIB) - 16_060_000_000) // (2 * 32 * 8 * 128 * 2)
    assert llama.tokens_per_s == pytest.approx(100e9 / 16.06e9)
    large = fits["llama-3.3-70b"]
    assert (large.format, large.kv_tokens, large.fits) == ("q4_k_m", 0, False)
    assert (fits["qwen3-8b"].kv_tokens >= MIN_KV_TOKENS, fits["qwen3-8b"].fits) == (True, True)


def test_extras_that_are_not_installed_are_notes_with_their_command(monkeypatch):
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None if name in ("av", "matplotlib") else name)
    notes = {finding.text.partition(" ")[0]: finding.mend for finding in room._packages() if finding.mend}
    assert notes == {"av": "pip install 'oneloop[media]'", "matplotlib": "pip install 'oneloop[bench]'"}


@pytest.mark.parametrize(
    ("num", "reach", "said"),
    [
        (1, True, ["18 NVLinks, PCIe 5 x16"]),
        (
            3,
            True,
            [
                "all 3 GPUs reach each other's memory; 18 NVLinks, PCIe 5 x16 each",
                "between any two of them 300 GB/s or more",
            ],
        ),
        (
            2,
            False,
            [
                "GPU 0 does not reach the memory of GPU 1, and so 2 of 2 ways; 18 NVLinks, PCIe 5 x16 each",
                "between GPU 0 and GPU 1 use --data-parallel-size or --pipeline-parallel-size, not --tensor-parallel-size",
            ],
        ),
    ],
)
def test_links_between_gpus_are_told(num, reach, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    monkeypatch.setattr(cuda_topology, "links_of", lambda devices: [cuda_topology.Links((5, 16), 18)] * len(devices))
    monkeypatch.setattr(room, "peer_rate", lambda one, other: 3e11 + other * 1e9)
    assert [finding.text for finding in room._links()] == said


def test_links_that_differ_are_told_by_device_and_unknown_ones_not_at_all():
    wide, narrow, none = (
        cuda_topology.Links((5, 16), 4),
        cuda_topology.Links((4, 8), 1),
        cuda_topology.Links(),
    )
    reach = [(0, 1), (1, 0)]
    told = cuda_topology.described([0, 1, 2], [wide, wide, narrow], lambda *pair: pair in reach)
    assert told == (
        "GPU 0 does not reach the memory of GPU 2, and so 4 of 6 ways; 4 NVLinks, PCIe 5 x16 each; "
        "GPU 2: 1 NVLink, PCIe 4 x8"
    )
    assert cuda_topology.described([5], [none], lambda *pair: True) == ""
    assert cuda_topology.described([0, 1], [none, none], lambda *pair: True) == "all 2 GPUs reach each other's memory"


def test_without_the_drivers_library_nothing_is_known_of_links(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda_topology.ctypes, "CDLL", missing)
    assert cuda_topology.links_of([0, 1]) == [cuda_topology.Links()] * 2


class Number:
    """As ctypes hands a pointer on."""

    @staticmethod
    def write(pointer, value: int) -> None:
        pointer._obj.value = value


class FakeNvml:
    """A device with two links of three up, in a slot of 16 lanes."""

    def __init__(self) -> None:
        self.places: list[bytes] = []
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, place, handle) -> int:
        self.places.append(place)
        return 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle, value) -> int:
        Number.write(value, 5)
        return 0

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle, value) -> int:
        Number.write(value, 16)
        return 0

    def nvmlDeviceGetNvLinkState(self, handle, link, value) -> int:
        if link.value > 2:
            return 2  # there is no such link
        Number.write(value, int(link.value < 2))
        return 0


def test_widths_are_asked_of_the_driver_by_the_place_of_the_device(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(cuda_topology.ctypes, "CDLL", lambda name: nvml)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    assert cuda_topology.links_of([3]) == [cuda_topology.Links((5, 16), 2)]
    assert nvml.places == [b"00000000:9b:01.0"]
    assert not nvml.is_open
