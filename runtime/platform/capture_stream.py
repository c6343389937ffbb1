"""The stream on which a device's graphs are captured: one for as long as the process lives.

cuBLAS keeps a workspace, 32 MiB on Hopper, for every stream that it has ever computed on. When each capture had a stream of its
own, three models that took turns on an H200 took 32 MiB more with each swap."""

from __future__ import annotations

from functools import cache

import torch


def capture_stream() -> torch.cuda.Stream:
    """The current device's. Of the same priority as a `SideStream`, which kernels keep when their graph is replayed: with a higher
    one, a picture's first token took four times as long beside one stream of decodes as when encoders ran within steps."""
    return _of_device(torch.cuda.current_device())


@cache
def _of_device(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
