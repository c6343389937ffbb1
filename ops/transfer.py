"""Copies between host and device, in stream order and without waiting.

If a device has its own queue and memory, host memory must be pinned. On a CPU, nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def is_remote(device: torch.device) -> bool:
    """Return whether the device's tensors are outside host memory."""
    return device.type != "cpu"


def upload(target: Tensor, values: NDArray[Any]) -> None:
    """Copy `values` to `target`, which has the same shape."""
    source = torch.from_numpy(values)
    if is_remote(target.device):
        source = source.pin_memory()  # the allocator keeps freed memory until the copy is done
    target.copy_(source, non_blocking=True)


def index_on(
    device: torch.device, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64
) -> Tensor:
    index = torch.tensor(values, dtype=dtype)
    return index.pin_memory().to(device, non_blocking=True) if is_remote(device) else index


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the host, whose transfer is enqueued. Read the result only after the work enqueued before has
    completed."""
    if not is_remote(tensor.device):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
