"""Fixtures of the op tests: every kernel in turn (the torch reference, then each instruction set), and thread counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ops

try:
    import oneloop_native
except ImportError:
    oneloop_native = None

ISAS = ("avx512vnni", "avx512", "avxvnni", "avx2", "portable")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernels of one instruction set; the usual ones again afterwards."""
    if oneloop_native is None:
        pytest.skip("oneloop_native is not built")
    if request.param not in oneloop_native.isas():
        pytest.skip(f"this processor has no {request.param}")
    usual = oneloop_native.isa()
    oneloop_native.set_isa(request.param)
    yield request.param
    oneloop_native.set_isa(usual)


@pytest.fixture(params=["reference", *ISAS])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way an op can be computed on this machine."""
    usual = None if oneloop_native is None else oneloop_native.isa()
    if request.param == "reference":
        ops.force("reference")
    else:
        if oneloop_native is None:
            pytest.skip("oneloop_native is not built")
        if request.param not in oneloop_native.isas():
            pytest.skip(f"this processor has no {request.param}")
        ops.force("native")
        oneloop_native.set_isa(request.param)
    yield request.param
    ops.force(None)
    if usual is not None:
        oneloop_native.set_isa(usual)


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its OpenMP threads would spin on the cores that ours need
    if oneloop_native is not None:
        oneloop_native.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    if oneloop_native is not None:
        oneloop_native.set_num_threads(1)
