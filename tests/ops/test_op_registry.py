"""Which kernel is chosen, who is told, and that threads come and go without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ops
from ops.gemm import cuda
from ops.registry import Kernel, Op, ShapeClass

ROOT = Path(__file__).parents[2]
FLOAT32 = ShapeClass("cpu", torch.float32)
FLOAT64 = ShapeClass("cpu", torch.float64)
NATIVE = {
    "linear",
    "rms_norm",
    "add_rms_norm",
    "rope",
    "store_kv",
    "paged_attention",
    "attend_packed",
    "silu_mul",
    "moe",
    "linear_by_head",
    "layer_norm",
    "add_layer_norm",
    "layer_norm_of_sum",
    "gated",
    "activate",
    "sample",
    "lora",
}  # ops that have such a kernel
OTHERS = {
    "embedding", "attend", "attend_latent", "unpack", "place_tokens", "place_behind", "causal_conv", "state_space_scan",
    "selective_scan", "gated_delta_rule", "gated_rms_norm", "lora_index", "look_up", "segment_mean",
}  # fmt: skip


def only_reference(line: str) -> bool:
    """Whether this line tells of a reference that was asked for, where there is anything else."""
    return ": reference" in line and "reference was asked for" in line


def never(case: ShapeClass) -> str | None:
    return "is never right"


def always(case: ShapeClass) -> str | None:
    return None


def op_of(name: str, *kernels: tuple[str, Callable[[ShapeClass], str | None]]) -> Op:
    """An op outside the list that describe() reads."""
    made = Op(
        name, FLOAT32, [Kernel(name, kernel, supports, lambda kernel=kernel: kernel) for kernel, supports in kernels]
    )
    ops.registry._ops.remove(made)
    return made


def test_the_first_kernel_that_can_is_taken_and_the_others_say_why_not() -> None:
    op = op_of("toy", ("fast", never), ("slow", always))
    assert op.choose(FLOAT32)() == "slow"
    assert op.describe() == ["toy: slow; not fast: is never right (float32 on cpu)"]


def test_a_choice_is_made_once_per_shape_class() -> None:
    cases: list[ShapeClass] = []

    def supports(case: ShapeClass) -> str | None:
        cases.append(case)
        return None if case.dtype == torch.float32 else "float32 only"

    op = op_of("toy", ("fast", supports), ("slow", always))
    cpu = torch.device("cpu")
    chosen = [op.runs[cpu, dtype]() for dtype in (torch.float32, torch.float64, torch.float32, torch.float64)]
    assert chosen == ["fast", "slow", "fast", "slow"]
    assert cases == [FLOAT32, FLOAT64]


def test_an_op_that_nothing_can_compute_says_everything_that_was_tried() -> None:
    with pytest.raises(NotImplementedError, match=r"toy: no kernel for float64 on cpu \(not fast: is never right\)"):
        op_of("toy", ("fast", never)).choose(FLOAT64)


def test_kernels_choose_by_the_weights_format_and_the_devices_capability() -> None:
    plain = ShapeClass("cuda", torch.bfloat16, weight=(ops.WeightFormat("bfloat16"),), capability=(8, 0))
    assert cuda.supports(plain) == "it requires compute capability 9.0 or more"
    blocks = plain._replace(weight=(ops.WeightFormat("Q4_K"),), capability=(9, 0))
    assert "not Q4_K" in str(cuda.supports(blocks))
    assert str(blocks) == "bfloat16 on cuda, weights in Q4_K"
    assert str(plain) == "bfloat16 on cuda"


def test_every_op_describes_itself_in_one_line() -> None:
    names = {line.split(":")[0] for line in ops.describe()}
    assert names == NATIVE | OTHERS


def test_forcing_the_reference_is_seen_in_the_description_and_can_be_undone() -> None:
    ops.force(None)
    free = ops.describe()
    ops.force("reference")
    lines = ops.describe()
    assert all(only_reference(line) for line in lines)
    assert {line.split(":")[0] for line in lines if "not native: reference was asked for" in line} == NATIVE
    ops.force(None)
    assert ops.describe() == free
    with pytest.raises(ValueError, match="no kernel is called 'fastest'"):
        ops.force("fastest")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_types_go_to_the_reference(dtype: torch.dtype) -> None:
    x = torch.randn(3, 16).to(dtype)
    assert ops.rms_norm(x, torch.ones(16, dtype=dtype), 1e-5).dtype == dtype
    assert ops.linear(x, ops.prepare_linear(ops.StoredWeight.dense(torch.randn(4, 16).to(dtype)))).dtype == dtype
    assert ops.silu_mul(x).dtype == dtype
    assert any(line.startswith("rms_norm: reference") and str(dtype)[6:] in line for line in ops.describe())


def python(code: str) -> str:
    """What a process of its own says, whatever instruction set this one was asked to use."""
    environment = {name: value for name, value in os.environ.items() if name != "ONELOOP_ISA"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_an_op_without_a_kernel_of_the_name_asked_for_keeps_its_choice(native: object) -> None:
    try:
        ops.force("native")
        lines = ops.describe()
    finally:
        ops.force(None)
    assert {line.split(":")[0] for line in lines if ": native" in line} == NATIVE
    assert any(line.startswith("unpack: reference") for line in lines)


def test_the_reference_can_be_asked_for_one_op_alone() -> None:
    try:
        ops.force("reference", "silu_mul")
        lines = {line.split(":")[0]: line for line in ops.describe()}
        assert "reference was asked for" in lines["silu_mul"]
        assert "was asked for" not in lines["rms_norm"]
    finally:
        ops.force(None, "silu_mul")
    assert not any("was asked for" in line for line in ops.describe())


def test_without_the_compiled_module_everything_is_computed_by_torch_and_said_once() -> None:
    block = "import sys; sys.modules['oneloop_native'] = None; import ops; ops.set_num_threads(1)"
    out = python(block + "; print(*ops.describe(), sep='\\n')")
    assert out.count("not native: oneloop_native is not built") == len(NATIVE)
    assert out.count("native CPU kernels are not built") == 1


@pytest.fixture
def native() -> object:
    return pytest.importorskip("oneloop_native", reason="oneloop_native is not built")


def test_thread_counts_are_checked(native: object) -> None:
    for n in (0, -1):
        with pytest.raises(ValueError, match="thread"):
            ops.set_num_threads(n)
    with pytest.raises(ValueError, match="not between 1 and 256"):
        ops.set_num_threads(257)


WORK = """
import os, threading, torch, ops
def threads(): return len(os.listdir('/proc/self/task'))
x, w = torch.randn(64, 512), ops.prepare_linear(ops.StoredWeight.dense(torch.randn(1024, 512)))
ops.set_num_threads(1); torch.set_num_threads(1); before = threads()
"""


def test_helpers_start_with_the_first_shared_call_and_leave_when_the_count_falls(native: object) -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc to count threads")
    code = WORK + (
        "ops.set_num_threads(3); assert threads() == before\n"
        "ops.linear(x, w); assert threads() == before + 2\n"
        "ops.set_num_threads(1); assert threads() == before\nprint('ok')"
    )
    assert python(code).strip() == "ok"


def test_a_forked_child_computes_with_threads_of_its_own(native: object) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    code = WORK + (
        "ops.set_num_threads(2); expected = ops.linear(x, w)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if torch.equal(ops.linear(x, w), expected) else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert torch.equal(ops.linear(x, w), expected)\nprint('ok')"
    )
    assert python(code).strip() == "ok"


def test_calls_from_several_threads_at_once_are_all_right(native: object) -> None:
    x, w = torch.randn(33, 256), ops.prepare_linear(ops.StoredWeight.dense(torch.randn(512, 256)))
    expected = ops.linear(x, w)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: ops.linear(x, w), range(64)))
    assert all(torch.equal(result, expected) for result in results)


def test_what_is_not_a_tensor_is_refused_by_name(native: object) -> None:
    with pytest.raises(TypeError, match="x is not a tensor"):
        native.rms_norm([1.0], torch.ones(1), 1e-5, torch.ones(1))  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="weight has an element type that no kernel reads"):
        native.rms_norm(torch.ones(1), torch.ones(1).double(), 1e-5, torch.ones(1))  # type: ignore[attr-defined]


def test_anything_that_speaks_dlpack_is_a_tensor(native: object) -> None:
    numpy = pytest.importorskip("numpy")
    out = numpy.zeros((2, 3), dtype="float32")
    native.silu_mul(numpy.ones((2, 6), dtype="float32"), out)  # type: ignore[attr-defined]
    assert out == pytest.approx(0.7310586)


@pytest.mark.parametrize("isa", ["portable", "avx2", "none-such"])
def test_the_environment_chooses_the_instruction_set_and_another_processor_s_is_an_error(native, isa: str) -> None:
    code = "import ops, oneloop_native; print(oneloop_native.isa(), [line for line in ops.describe() if 'native' in line][0])"
    environment = {**os.environ, "ONELOOP_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if isa in native.isas():
        assert done.stdout.startswith(isa), done.stderr
        assert f"native {isa} (" in done.stdout
    else:
        assert done.returncode
        assert f"ONELOOP_ISA={isa}: the compiled CPU kernels here are for " in done.stderr


@pytest.mark.gpu
def test_on_a_gpu_triton_computes_what_it_can_and_torch_the_rest():
    x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), ops.rms_norm(x.cpu(), weight.cpu(), 1e-5).cuda())
    lines = "\n".join(ops.describe())
    assert "rms_norm: triton; not native: " in lines
    assert "on cuda)" in lines
