"""Means of segments against float64: Triton's by the interpreter on a CPU and for real on a GPU, and the reference."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.segment import triton_segment
from tests.ops.places import DEVICES, places

PLACES = places(1e-6, 1e-6, 1e-6)  # sums in float32, whatever they are of


def case(device, dtype, lengths: list[int], hidden: int, padding: int):
    x = torch.randn(sum(lengths) + padding, hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)
    x[sum(lengths) :] = torch.nan
    wanted = torch.stack([part.double().mean(dim=0) for part in x[: sum(lengths)].split(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return x.to(device), starts.to(device), wanted.to(device)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize(("lengths", "hidden"), [([5, 1, 70, 64], 96), ([200], 64), ([1, 1], 1000)])
@pytest.mark.parametrize("run", [ops.segment_mean, triton_segment.segment_mean], ids=["chosen", "triton"])
def test_each_segment_has_its_mean(run, lengths, hidden, device, dtype, tolerance):
    x, starts, wanted = case(device, dtype, lengths, hidden, padding=3)
    got = run(x, starts)
    assert got.dtype == torch.float32
    assert float((got.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_no_segment(device):
    x = torch.randn(3, 8, device=device)
    assert triton_segment.segment_mean(x, torch.zeros(1, dtype=torch.int64, device=device)).shape == (0, 8)
