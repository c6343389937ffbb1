"""Where a Triton kernel is tested: by its interpreter on a machine without a GPU, and for real on one that has one."""

from __future__ import annotations

import pytest
import torch

_INTERPRETED = (
    pytest.mark.interpreted,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
)

DEVICES = [pytest.param("cpu", marks=_INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


def places(float32: float, float16: float, bfloat16: float) -> list:
    """(device, dtype, tolerance) for every combination that exists."""
    dtypes = ((torch.float32, float32), (torch.float16, float16), (torch.bfloat16, bfloat16))
    found = []
    for device, mark in (("cpu", _INTERPRETED), ("cuda", pytest.mark.gpu)):
        for dtype, tolerance in dtypes:
            if device == "cpu" and dtype == torch.bfloat16:
                continue  # the interpreter multiplies its bits as if they were integers
            name = f"{device}-{str(dtype).removeprefix('torch.')}"
            found.append(pytest.param(device, dtype, tolerance, marks=mark, id=name))
    return found


def interpreted_once(found: list) -> list:
    """Without the interpreter in 16 bits: where another test has them, what this one is about does not hang on the type."""
    return [place for place in found if place.id != "cpu-float16"]


def interpreted_in_16_bits(found: list) -> list:
    """The interpreter in 16 bits alone: what `interpreted_once` leaves out, for a test of few shapes."""
    return [place for place in found if place.id == "cpu-float16"]
