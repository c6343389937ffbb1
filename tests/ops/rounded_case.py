"""What any linear layer that rounds its inputs must do with numbers that are none, or tiny, or huge."""

from __future__ import annotations

import torch

import ops


def assert_bad_rows_stay_alone(w: ops.LinearWeight) -> None:
    """`w`: of 256 inputs."""
    x = torch.randn(20, 256)
    x[3, 5], x[4, 5], x[6] = float("nan"), float("inf"), 0.0
    for tokens in (7, 20):
        out = ops.linear(x[:tokens], w)
        assert out[3].isnan().all()
        assert not out[4].isfinite().any()
        assert (out[6] == 0).all()
        assert out[[0, 1, 2, 5]].isfinite().all()


def assert_finite_at_any_size(w: ops.LinearWeight) -> None:
    """`w`: of 256 inputs."""
    for size in (1e-45, 1e-38, 1e-20, 1e30):
        assert ops.linear(torch.randn(3, 256).sign() * size, w).isfinite().all()
