"""Reader of GGUF files, metadata and tensors, which are treated as untrusted data.

Every count and length is checked against the rest of the file before memory is allocated, so a hostile file causes only a
WeightsError. The header is read through a memory mapping that is then closed. Tensors are read with pread, because accessing a
mapped file after its truncation kills the process. This module reads the container (versions 2 and 3) and does not interpret the
tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import copy
import mmap
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from runtime.weights.dequantize import FORMATS, TYPES_BY_ID, Bytes, Floats, dequantize
from runtime.weights.rules import Shape, WeightsError

_MAGIC = b"GGUF"
_MAX_ELEMENTS = 1 << 24  # total of all metadata arrays; the largest vocabularies have about 3 * 2**18
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, a one-byte key, its type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, name, one dimension, type, offset

_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}.items()
}  # fmt: skip

# llama.cpp's names of mixed types
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Description of a tensor in a GGUF file. `shape`: in numpy's order, rows first. Its data is bytes `offset` to `offset +
    nbytes` of the file, row by row."""

    name: str
    shape: Shape
    type: str
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Number of bytes in one row, i.e. one index of the first dimension."""
        return self.nbytes // self.shape[0]


class GgufFile:
    """Open GGUF file. `metadata`: Python values by key, arrays as lists. `tensors`: descriptions by GGUF name. Close it, or use it
    as a context manager. Raises FileNotFoundError, and WeightsError with the file's name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._fd = _open(self.path)
        try:
            self.metadata, self.tensors = _read_header(self.path, self._fd)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. `metadata` and `tensors` remain available."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    @property
    def quantization(self) -> str:
        """Name of the file's quantisation, such as Q4_K_M, from the metadata. Without it, the tensor type with most bytes."""
        said = self.metadata.get("general.file_type")
        if isinstance(said, int) and said in _FILE_TYPES:
            return _FILE_TYPES[said]
        nbytes = Counter[str]()
        for tensor in self.tensors.values():
            nbytes[tensor.type] += tensor.nbytes
        return max(nbytes, key=nbytes.__getitem__, default="F32")

    def reopened(self) -> GgufFile:
        """Return the same file opened again, to read tensors after this object is closed. The header is not parsed again."""
        fresh = copy.copy(self)
        fresh._fd = _open(self.path)
        return fresh

    def raw_rows(self, tensor: GgufTensor, start: int, stop: int) -> Bytes:
        """Return rows [start, stop) of a tensor as stored: [stop - start, row_bytes] uint8. Thread-safe."""
        rows = np.empty((stop - start, tensor.row_bytes), np.uint8)
        self.read_raw_rows(tensor, start, rows)
        return rows

    def read_raw_rows(self, tensor: GgufTensor, start: int, out: Bytes) -> None:
        """Read rows of a tensor as stored, from row `start` on, until the contiguous `out` is full."""
        read_exactly(self._fd, out, tensor.offset + start * tensor.row_bytes, self.path)

    def read(self, name: str) -> Floats:
        """Return a tensor, dequantised to float32, in its own shape."""
        tensor = self.tensors[name]
        if tensor.type not in FORMATS:
            raise WeightsError(
                f"{self.path}: tensor {name} is {tensor.type}, which is not supported ({', '.join(FORMATS)})"
            )
        values = np.empty(tensor.shape, np.float32)
        dequantize(self.raw_rows(tensor, 0, tensor.shape[0]), FORMATS[tensor.type], values)
        return values


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_exactly(fd: int, buffer: Bytes, offset: int, path: Path) -> None:
    """Fill the contiguous `buffer` with bytes of the file from `offset` on. Raises WeightsError if the file ends early or cannot be
    read."""
    view = buffer.reshape(-1).data
    while view:
        try:
            count = os.preadv(fd, [view], offset)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
        if count == 0:
            raise WeightsError(f"{path}: ends at byte {offset}, in the middle of a tensor")
        view, offset = view[count:], offset + count


def _read_header(path: Path, fd: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise WeightsError(f"{path}: not a file")
    if status.st_size < 24:
        raise WeightsError(f"{path}: not a GGUF file: only {status.st_size} bytes")
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        num_tensors, num_keys = reader.start()
        metadata = reader.metadata(num_keys)
        return metadata, reader.tensors(num_tensors, metadata.get("general.alignment", 32))


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._elements_left = _MAX_ELEMENTS

    def error(self, text: str) -> WeightsError:
        return WeightsError(f"{self._path}: broken GGUF file: {text}")

    def start(self) -> tuple[int, int]:
        """Check magic and version, and return (number of tensors, number of metadata keys)."""
        if self._data[:4] != _MAGIC:
            raise WeightsError(f"{self._path}: not a GGUF file: it begins with {self._data[:4]!r}")
        self._at = 4
        version = self.scalar(4)
        if version not in (2, 3):
            big = version & 0xFFFF == 0
            kind = "big-endian files are not read" if big else f"version {version} is not read, only 2 and 3"
            raise WeightsError(f"{self._path}: GGUF {kind}")
        num_tensors, num_keys = self.scalar(10), self.scalar(10)
        for count, size, what in (
            (num_tensors, _MIN_TENSOR_BYTES, "tensors"),
            (num_keys, _MIN_KEY_BYTES, "metadata keys"),
        ):
            if count * size > self._size:
                raise self.error(f"{count} {what} do not fit in {self._size} bytes")
        return num_tensors, num_keys

    def need(self, count: int) -> None:
        if count > self._size - self._at:
            raise self.error(f"{count} bytes are announced at byte {self._at}, but it ends at byte {self._size}")

    def scalar(self, code: int) -> Any:
        packed = _SCALARS[code]
        self.need(packed.size)
        (value,) = packed.unpack_from(self._data, self._at)
        self._at += packed.size
        return value

    def string(self) -> str:
        length = self.scalar(10)
        self.need(length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in found:
                raise self.error(f"the metadata key {key!r} occurs twice")
            found[key] = self.value(self.scalar(4), key, 0)
        return found

    def value(self, code: int, key: str, depth: int) -> Any:
        if code in _SCALARS:
            return self.scalar(code)
        if code == _STRING:
            return self.string()
        if code != _ARRAY:
            raise self.error(f"{key!r} has the unknown value type {code}")
        if depth == _MAX_ARRAY_DEPTH:
            raise self.error(f"{key!r} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item, count = self.scalar(4), self.scalar(10)
        if count > self._elements_left:
            raise self.error(f"{key!r} has {count} elements; all arrays together may have {_MAX_ELEMENTS}")
        self._elements_left -= count
        if item in _SCALARS:
            return self.numbers(item, count)
        if item == _STRING:
            return self.strings(count)
        return [self.value(item, key, depth + 1) for _ in range(count)]

    def numbers(self, code: int, count: int) -> list[Any]:
        packed = _SCALARS[code]
        self.need(count * packed.size)
        values = struct.unpack_from(f"<{count}{packed.format[1:]}", self._data, self._at)
        self._at += count * packed.size
        return list(values)

    def strings(self, count: int) -> list[str]:
        """Read `count` strings. The code of `string` is repeated here for speed: a header may contain 100,000 strings."""
        data, at, size = self._data, self._at, self._size
        unpack: Callable[[mmap.mmap, int], tuple[int]] = _SCALARS[10].unpack_from
        self.need(8 * count)
        found: list[str] = []
        for _ in range(count):
            if at + 8 > size or (end := at + 8 + unpack(data, at)[0]) > size:
                raise self.error(f"string {len(found)} of an array goes past its end at byte {size}")
            found.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return found

    def tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, not a power of two up to {1 << 20}")
        infos = [self.tensor_info() for _ in range(count)]
        data_start = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, nbytes, offset in infos:
            if name in found:
                raise self.error(f"the tensor {name!r} occurs twice")
            if offset % alignment:
                raise self.error(f"the tensor {name!r} starts at {offset}, which is not aligned to {alignment}")
            if data_start + offset + nbytes > self._size:
                end = data_start + offset + nbytes
                raise self.error(f"the tensor {name!r} ends at byte {end}, the file at byte {self._size}: cut short?")
            found[name] = GgufTensor(name, shape, kind, data_start + offset, nbytes)
        return found

    def tensor_info(self) -> tuple[str, Shape, str, int, int]:
        name = self.string()
        num_dims = self.scalar(4)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.error(f"the tensor {name!r} has {num_dims} dimensions")
        dims = [self.scalar(10) for _ in range(num_dims)]
        code, offset = self.scalar(4), self.scalar(10)
        if code not in TYPES_BY_ID:
            raise self.error(f"the tensor {name!r} has the unknown type {code}")
        kind = TYPES_BY_ID[code]
        if 0 in dims or dims[0] % kind.weights:
            raise self.error(f"the tensor {name!r} of shape {dims[::-1]} does not divide into blocks of {kind.name}")
        nbytes = prod(dims) // kind.weights * kind.size
        if nbytes > self._size:
            raise self.error(f"the tensor {name!r} of shape {dims[::-1]} is larger than the file")
        return name, tuple(dims[::-1]), kind.name, nbytes, offset
