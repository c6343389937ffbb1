"""Reductions over segments: adjacent rows of a tensor, such as the tokens of one text."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import backends


def _by_torch(x: Tensor, starts: Tensor) -> Tensor:
    wide = x[: int(starts[-1])].to(torch.promote_types(x.dtype, torch.float32))
    found: Tensor = torch.segment_reduce(wide, "mean", lengths=starts.diff(), axis=0, unsafe=True)
    return found


_segment_mean = backends.on_gpus("segment_mean", "ops.segment.triton_segment:segment_mean", _by_torch)


def segment_mean(x: Tensor, starts: Tensor) -> Tensor:
    """Return the mean [R, H] float32 of each segment of x [T, H]. Segment r is rows starts[r] to starts[r + 1]. starts [R + 1]
    int64, ascending, ends with T."""
    return _segment_mean.runs[x.device, x.dtype](x, starts)
