"""Kernels that begin to compile at their launch are all compiled in the end, and nothing of theirs has run."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import ops
from ops.compiling import compile_together, prepare


@triton.jit
def _count(out_ptr, BY: tl.constexpr):
    tl.store(out_ptr, tl.load(out_ptr) + BY)


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[list[str]]:
    """Kernels as they get compiled; the cache on disk is a new one."""
    names: list[str] = []

    def note(**what: object) -> None:
        names.append(str(what["fn"].name))  # type: ignore[attr-defined]

    with triton.knobs.cache.scope(), triton.knobs.runtime.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.runtime.jit_post_compile_hook = note
        yield names


@pytest.mark.gpu
def test_launches_inside_run_nothing_and_those_behind_find_their_kernels_compiled(compiled: list[str]) -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    with ops.compile_together(out.device):
        for by in (3, 4, 3):
            _count[(1,)](out, BY=by)
        assert torch.empty(1000, dtype=torch.int64, device="cuda").count_nonzero() == 0
    assert out.item() == 0
    assert compiled == ["_count", "_count"]
    _count[(1,)](out, BY=3)
    _count[(1,)](out, BY=4)
    assert out.item() == 7
    assert len(compiled) == 2


@pytest.mark.gpu
def test_the_hook_of_others_is_back_afterwards() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with ops.compile_together(torch.device("cuda")):
        pass
    assert triton.knobs.runtime.jit_cache_hook is before


def test_on_a_cpu_steps_run_as_ever() -> None:
    with ops.compile_together(torch.device("cpu")):
        assert ops.activate(torch.ones(2, 4), "relu").sum() == 8


def test_who_comes_while_another_thread_compiles_leaves_its_hook_alone() -> None:
    before, cpu = triton.knobs.runtime.jit_cache_hook, torch.device("cpu")
    with compile_together(cpu):
        hook = triton.knobs.runtime.jit_cache_hook
        with compile_together(cpu):
            inside = triton.knobs.runtime.jit_cache_hook
        assert triton.knobs.runtime.jit_cache_hook is inside is hook is not before
    assert triton.knobs.runtime.jit_cache_hook is before


def test_triton_sums_itself_up_on_one_thread_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, others_come, made = threading.Event(), threading.Event(), []

    def sum_up() -> None:
        if not made:
            made.append(threading.get_ident())
            begun.set()
            others_come.wait()
            made.append("whole")
        assert made[1:] == ["whole"]

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("triton.runtime.cache.triton_key", sum_up)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=str)))
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(prepare, torch.device("cuda"))]
        begun.wait()
        jobs += [threads.submit(prepare, torch.device("cuda")) for _ in range(2)]
        others_come.set()
        for job in jobs:
            job.result()
