"""PeerMemory: exchange buffers of one rank, on a CUDA device whose memory all peers can access (peers.cu).

Every rank calls the same methods in the same order, on its own stream; nothing waits on the host, and calls can be captured."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ops.cuda.program import CompiledKernel, Program, missing

MAX_RANKS = 8
LINES_BYTES = 512 << 10  # maximum size of tensors that are pushed to the others; larger ones are pulled by them
BLOCKS_BYTES = 64 << 20  # bytes exchanged at a time
_PER_BLOCK = 2048  # vectors of 16 bytes
_MAX_NORMED = 16384  # maximum number of features, distributed over a block's threads
_NORM_BLOCKS, _NORM_ROWS = 264, 8  # with at least so many blocks, a block has several rows, up to this number
_PROGRAM = Program(
    [Path(__file__).with_name("peers.cu")],
    {
        "sum_lines": "SUM_LINES(sum_lines, false)",
        "sum_lines_wide": "SUM_LINES(sum_lines_wide, true)",
        "sum_blocks": "SUM_BLOCKS(sum_blocks, false)",
        "sum_blocks_wide": "SUM_BLOCKS(sum_blocks_wide, true)",
        "sum_lines_norm": "SUM_LINES_NORM(sum_lines_norm)",
        "sum_blocks_norm": "SUM_BLOCKS_NORM(sum_blocks_norm)",
        "concat_columns": "CONCAT_BLOCKS(concat_columns)",
    },
    listed=False,
)


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64 * MAX_RANKS) for name in ("lines", "blocks", "flags")]


class PeerMemory:
    """Memory of rank `number` of `size` ranks that the other ranks can access. It can be used after `meet`."""

    def __init__(self, number: int, size: int, device: torch.device) -> None:
        self.number, self.size = number, size
        vectors = BLOCKS_BYTES // 16
        sizes = (2 * size * (LINES_BYTES // 8) * 16, 2 * BLOCKS_BYTES, (vectors // _PER_BLOCK) * size * 4)
        self._parts = [torch.zeros(num, dtype=torch.uint8, device=device) for num in sizes]
        self._calls = torch.zeros(2, dtype=torch.int32, device=device)
        self._memory = _Memory()
        self._kernels: dict[tuple[str, torch.dtype], CompiledKernel] = {}

    @property
    def addresses(self) -> list[int]:
        """Return the addresses of the parts, for the other ranks."""
        return [part.data_ptr() for part in self._parts]

    def meet(self, addresses: Sequence[Sequence[int]], devices: Sequence[int]) -> None:
        """Connect to the other ranks. `addresses` and `devices` are in the order of ranks. Raises RuntimeError if this device
        cannot access another's memory."""
        for rank, (parts, device) in enumerate(zip(addresses, devices, strict=True)):
            if rank != self.number:
                _reach(self._calls.device.index, device)
            for name, address in zip(("lines", "blocks", "flags"), parts, strict=True):
                getattr(self._memory, name)[rank] = address

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x (16 or 32 bits) over ranks, in a new tensor. It is added in float32 in rank order: all ranks
        get equal bits."""
        x = x.contiguous()
        out = torch.empty_like(x)
        wide = "_wide" if x.element_size() == 4 else ""
        if not x.numel():
            return out
        if x.nbytes <= LINES_BYTES and x.nbytes % 4 == 0:
            words = x.nbytes // 4
            grid = min(64, math.ceil(words / 2 / 256))
            self._kernel("sum_lines" + wide, x).launch(
                (grid, 1, 1), 256, 0, x, out, words, self._memory, self._calls, self.number, self.size, LINES_BYTES // 8
            )
            return out
        if x.nbytes % 16:
            raise ValueError(f"{x.nbytes} bytes are not a multiple of a vector")
        flat, whole = x.view(-1), out.view(-1)
        for first in range(0, x.numel(), step := BLOCKS_BYTES // x.element_size()):
            part = slice(first, first + step)
            self._blocks("sum_blocks" + wide, flat[part], whole[part])
        return out

    def can_norm(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether `add_rms_norm` supports these tensors."""
        return x.element_size() == 2 and weight.dtype == x.dtype and x.shape[1] <= _MAX_NORMED and not x.shape[1] % 8

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of x [T, H] over ranks to residual [T, H] in place, and return its RMS norm [T, H], in one kernel; see
        `ops.add_rms_norm`. All tensors have one 16-bit dtype; results are the same bits on every rank."""
        x, out = x.contiguous(), torch.empty_like(residual)
        rows, features = x.shape
        if x.nbytes <= LINES_BYTES:
            threads = min(1024, -(-features // 4 // 32) * 32)
            if rows:
                self._kernel("sum_lines_norm", x).launch(
                    (rows, 1, 1), threads, 0, x, residual, weight, out, features // 4, eps, self._memory, self._calls, self.number,
                    self.size, LINES_BYTES // 8,
                )  # fmt: skip
            return out
        vectors = features // 8
        step = min(BLOCKS_BYTES // (features * 2), (BLOCKS_BYTES // 16 // _PER_BLOCK) * _NORM_ROWS)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            num = min(step, rows - first)
            per_block = min(_NORM_ROWS, math.ceil(num / _NORM_BLOCKS))
            self._kernel("sum_blocks_norm", x).launch(
                (math.ceil(num / per_block), 1, 1), 512, 0, x[part], residual[part], weight, out[part], num, per_block, vectors,
                eps, self._memory, self._calls, self.number, self.size, BLOCKS_BYTES // 16,
            )  # fmt: skip
        return out

    def concat(self, x: Tensor) -> Tensor:
        """Return the columns x [T, N] of all ranks, concatenated in rank order: [T, ranks * N]."""
        x = x.contiguous()
        rows, columns = x.shape
        out = x.new_empty(rows, self.size * columns)
        row_bytes = columns * x.element_size()
        if row_bytes % 16:
            raise ValueError(f"rows of {row_bytes} bytes are not a multiple of a vector")
        step = max(1, BLOCKS_BYTES // row_bytes)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            self._blocks("concat_columns", x[part], out[part], row_bytes // 16)
        return out

    def _blocks(self, name: str, x: Tensor, out: Tensor, *width: int) -> None:
        vectors = x.nbytes // 16
        self._kernel(name, x).launch(
            (math.ceil(vectors / _PER_BLOCK), 1, 1), 512, 0, x, out, vectors, _PER_BLOCK, *width, self._memory, self._calls,
            self.number, self.size, BLOCKS_BYTES // 16,
        )  # fmt: skip

    def _kernel(self, name: str, x: Tensor) -> CompiledKernel:
        key = name, x.dtype
        if key not in self._kernels:
            half = x.dtype if x.element_size() == 2 else torch.bfloat16
            self._kernels[key] = _PROGRAM.kernel(name, half, x.device)
        return self._kernels[key]


def refusal(devices: Sequence[int]) -> str | None:
    """Return why the CUDA devices of these indices cannot exchange tensors, or None if they can."""
    if (why := missing()) is not None:
        return why
    if len(devices) > MAX_RANKS:
        return f"at most {MAX_RANKS} devices exchange tensors"
    if max(devices) >= (there := torch.cuda.device_count()):
        return f"there are {there} devices"
    for one in devices:
        for other in devices:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"device {one} does not reach the memory of device {other}"
    return None


def _reach(device: int, other: int) -> None:
    from cuda.bindings import runtime

    runtime.cudaSetDevice(device)
    (status,) = runtime.cudaDeviceEnablePeerAccess(other, 0)
    if status not in (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled):
        raise RuntimeError(f"device {device} does not reach the memory of device {other}: {status.name}")
