"""What `oneloop doctor` finds: true of this machine, and arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

import ops
from runtime.doctor import findings as room
from runtime.doctor.what_fits import SIZES, what_fits

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
    fits = {(fit.model, fit.format): fit for fit in what_fits(20 * GIB, 100e9, ("bf16", "Q4_K"))}
    assert len(fits) == 2 * len(SIZES)
    llama = fits["Llama-3.1-8B", "bf16"]
    assert (llama.weights_bytes, llama.fits) == (16_060_000_000, True)
    assert llama.kv_tokens == (int(18 * GIB) - 16_060_000_000) // (2 * 32 * 8 * 128 * 2)
    assert llama.tokens_per_s == pytest.approx(100e9 / 16.06e9)
    assert (fits["Qwen3-32B", "bf16"].kv_tokens, fits["Qwen3-32B", "bf16"].fits) == (0, False)
    assert fits["Qwen3-32B", "Q4_K"].weights_bytes == int(32.8e9 * 4.5 / 8)


def test_extras_that_are_not_installed_are_notes_with_their_command(monkeypatch):
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None if name in ("av", "matplotlib") else name)
    notes = {finding.text.partition(" ")[0]: finding.mend for finding in room._packages() if finding.mend}
    assert notes == {"av": "pip install 'oneloop[media]'", "matplotlib": "pip install 'oneloop[bench]'"}


@pytest.mark.parametrize(
    ("num", "reach", "said"),
    [
        (1, True, []),
        (3, True, ["all 3 GPUs reach each other's memory, at 300 GB/s or more"]),
        (
            2,
            False,
            ["GPU 0 does not reach the memory of GPU 1: use --data-parallel-size there, not --tensor-parallel-size"],
        ),
    ],
)
def test_links_between_gpus_are_told(num, reach, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    monkeypatch.setattr(room, "peer_rate", lambda one, other: 3e11 + other * 1e9)
    assert [finding.text for finding in room._links()] == said
