"""Tensor maps: how Hopper's copy engine is told to find a tile of a matrix, of bytes or 16-bit floats, and to put it swizzled into
shared memory.

Made by the driver, on the host, for one address; kernels take them by value."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_BYTES = _ALIGNMENT = 128
_DATA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3

_Ints = tuple[int, ...]


class TensorMap(ctypes.Structure):
    """128 opaque bytes, to be passed to a kernel by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * (_BYTES // 8))]


def tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Tiles of `box` elements, at most 256 each way, out of the view `sizes` by `strides` (elements) of a tensor's memory, the
    fastest dimension first: 128 bytes of stride 1, a row of shared memory. What lies outside `sizes` is read as zero.

    Raises ValueError for what the driver refuses: an address or stride that is no multiple of 16 bytes, mostly."""
    return _made(
        _DATA_TYPES[tensor.dtype], tensor.itemsize, tensor.data_ptr(), tuple(sizes), tuple(strides), tuple(box)
    )


@functools.lru_cache(4096)  # a map says where and how, and nothing of what lies there
def _made(data_type: int, size: int, address: int, sizes: _Ints, strides: _Ints, box: _Ints) -> TensorMap:
    room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    found = TensorMap.from_buffer(room, -ctypes.addressof(room) % _ALIGNMENT)
    rank, words64, words32 = len(sizes), ctypes.c_uint64 * len(sizes), ctypes.c_uint32 * len(sizes)
    status = _encode()(
        ctypes.byref(found), data_type, rank, ctypes.c_void_p(address), words64(*sizes),
        words64(*(stride * size for stride in strides[1:])), words32(*box), words32(*[1] * rank),
        0, _SWIZZLE_128B, _L2_PROMOTION_256B, 0,
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"no tensor map for {sizes} by {strides} in boxes of {box}: CUDA error {status}")
    return found


@functools.cache
def _encode() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
