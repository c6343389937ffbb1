"""CUDA sources are put together out of several files: kernels of each program compile by what a device compiles them with."""

from __future__ import annotations

import pytest
import torch

from ops.attention import cuda as decode
from ops.attention import prefill
from ops.collective import peer_memory
from ops.cuda.program import Program, machine_code
from ops.gemm import few_rows, few_rows_coded, tiled, tiled_fp8, tiled_plus, tiled_w4
from ops.lora import few_tokens
from ops.moe import experts_coded
from ops.stored import E2M1, FP8, NF4, Q4, Q8, W4, W8
from ops.tuning.files import read
from tests.tiers import on_push

pytest.importorskip("cuda.bindings.nvrtc", reason="requirements/nvrtc.txt is not installed", exc_type=ImportError)

PROGRAMS = {
    "few_rows": few_rows._PROGRAM,
    "few_rows_fp8": few_rows_coded.program(FP8),
    "few_rows_w8": few_rows_coded.program(W8),
    "few_rows_w4": few_rows_coded.program(W4),
    "tiled": tiled._PROGRAM,
    "tiled_plus": tiled_plus._PROGRAM,
    "few_tokens": few_tokens._PROGRAM,
    "tiled_w4": tiled_w4.program(),
    **{f"tiled_{codes}": tiled_w4.program(codes) for codes in (E2M1, NF4, Q4, Q8)},
    "tiled_fp8": tiled_fp8.program(),
    "experts_coded": experts_coded.program(),
    "decode": decode._program(read("nvidia-h200").tuning(132).attention.decode, "u16"),
    "decode_fp8": decode._program(read("nvidia-h200").tuning(132).attention.decode, "u8"),
    "decode_int8": decode._program(read("nvidia-h200").tuning(132).attention.decode, "s8"),
    "prefill": prefill._PROGRAM,
    "prefill_fp8": prefill.coded_program(),
    "peers": peer_memory._PROGRAM,
}
# One of each file.
ON_PUSH = (
    "few_rows", "few_rows_w4", "tiled", "few_tokens", "tiled_w4", "tiled_fp8", "experts_coded", "decode_int8", "prefill_fp8",
    "peers",
)  # fmt: skip


@pytest.mark.parametrize(
    ("share", "dtype"),
    on_push([(0.0, torch.bfloat16), (0.5, torch.float16), (1.0, torch.bfloat16)], (1.0, torch.bfloat16)),
    ids=str,
)
@pytest.mark.parametrize("name", on_push(PROGRAMS, *ON_PUSH))
def test_a_program_compiles(name, share, dtype):
    """The smallest and the largest of its kernels in one type, one between them in the other."""
    program: Program = PROGRAMS[name]
    instances = list(program.instances)
    instance = instances[int(share * (len(instances) - 1))]
    assert len(machine_code(program.source(instance), dtype, "sm_90a")) > 1000
