"""Kernels for 64-bit ARM beside plain arithmetic, in an emulator: a program cross-compiled from tests/ops/check_kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# check_kernels, as its CMakeLists.txt makes it for aarch64
PROGRAM = Path(os.environ.get("CHECK_ARM_KERNELS", ""))

pytestmark = [
    pytest.mark.skipif(not PROGRAM.is_file(), reason="no program for ARM (CHECK_ARM_KERNELS, see .ci/run)"),
    pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="no qemu-aarch64"),
]


@pytest.mark.parametrize(
    ("processor", "sets"),
    [
        ("cortex-a53", ["neon", "portable"]),
        ("max", ["neoni8mm", "neondot", "neon", "portable"]),
    ],
)
def test_every_set_of_a_processor_computes_what_plain_arithmetic_does(processor: str, sets: list[str]) -> None:
    run = subprocess.run(["qemu-aarch64", "-cpu", processor, PROGRAM], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split("\n")[0].split()) == (0, sets), run.stdout + run.stderr
