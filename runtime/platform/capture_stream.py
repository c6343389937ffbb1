"""The stream on which a device's graphs are captured: one for as long as the process lives.

cuBLAS keeps a workspace, 32 MiB on Hopper, for every stream that it has ever computed on. When each capture had a stream of its
own, three models that took turns on an H200 took 32 MiB more with each swap."""

from __future__ import annotations

from functools import cache

import torch


def capture_stream() -> torch.cuda.Stream:
    """The current device's. Its priority is above that of a `SideStream`, which kernels keep when their graph is replayed."""
    return _of_device(torch.cuda.current_device())


@cache
def _of_device(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index, priority=-1)
