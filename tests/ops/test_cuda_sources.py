"""CUDA sources are put together out of several files: the compiler's front end takes one kernel of each program."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ops.attention import cuda as decode
from ops.attention import prefill
from ops.collective import peer_memory
from ops.cuda.program import Program
from ops.gemm import few_rows, few_rows_coded, tiled, tiled_fp8, tiled_w4
from ops.moe import experts_coded
from ops.stored import FP8, W4
from ops.tuning.files import read

NVCC = shutil.which("nvcc")
PROGRAMS = {
    "few_rows": few_rows._PROGRAM,
    "few_rows_fp8": few_rows_coded.program(FP8),
    "few_rows_w4": few_rows_coded.program(W4),
    "tiled": tiled._PROGRAM,
    "tiled_w4": tiled_w4.program(),
    "tiled_fp8": tiled_fp8.program(),
    "experts_coded": experts_coded.program(),
    "decode": decode._program(read("nvidia-h200").tuning(132).attention.decode, False),
    "decode_fp8": decode._program(read("nvidia-h200").tuning(132).attention.decode, True),
    "prefill": prefill._PROGRAM,
    "peers": peer_memory._PROGRAM,
}


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_put_together(name, tmp_path):
    program: Program = PROGRAMS[name]
    source = tmp_path / "kernel.cu"
    source.write_text(program.source(next(iter(program.instances))))
    command = [NVCC, "-std=c++17", "-arch=compute_90a", "-ptx", "-o", str(tmp_path / "kernel.ptx"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
