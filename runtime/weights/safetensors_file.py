"""Reader of safetensors: a JSON header and tensors, checked before use, in one file or in several with an index.

Data is read with pread directly into the caller's memory. A checkpoint is neither mapped nor stored twice.

Format: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from runtime.weights.dequantize import FORMATS, Bytes, dequantize
from runtime.weights.dtypes import Array, store
from runtime.weights.formats import UNCONFIGURED
from runtime.weights.formats.scheme import Scheme, StoredTensor, StoredTensors, Written
from runtime.weights.gguf import read_exactly
from runtime.weights.rules import Shape, Span, WeightsError

_MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
_SAME_AS_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_INTEGERS = {"I32": np.int32, "I64": np.int64}  # of indices: float32 represents all below 2 ** 24
_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
}  # further types
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Stored:
    file: int  # index into the open files
    format: str
    shape: Shape
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Number of bytes in one row, i.e. one index of the first dimension."""
        return self.nbytes // max(1, self.shape[0] if self.shape else 1)


@dataclass(frozen=True, slots=True)
class _Quantised:
    written: Written
    shape: Shape
    parts: Mapping[str, _Stored]  # by role


class SafetensorsCheckpoint:
    """Tensors of a folder of safetensors files, an implementation of `stream.TensorReader`. Several tensors of a quantised weight
    appear as one. It must be closed.

    `beside`: further files, by the prefix that is added to their tensors' names. `single`: the only file to read in the folder.
    Raises WeightsError if files are missing, broken or unsupported."""

    def __init__(
        self, folder: Path, schemes: Sequence[Scheme] = UNCONFIGURED, beside: Mapping[str, Path] = MappingProxyType({}),
        *, single: str | None = None,
    ) -> None:  # fmt: skip
        self._fds: list[int] = []
        self._paths: list[Path] = []
        self._tensors: dict[str, _Stored] = {}
        self._metadata: dict[str, str] = {}
        try:
            found = _files(folder) if single is None else {folder / single: None}
            for path, names in found.items():
                self._open(path, names)
            for prefix, path in beside.items():
                self._open(path, None, f"{prefix}.")
            self._quantised = self._put_together(schemes)
        except BaseException:
            self.close()
            raise
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.shapes: Mapping[str, Shape] = shapes | {name: each.shape for name, each in self._quantised.items()}
        types = {name: tensor.format for name, tensor in self._tensors.items()}
        self.types: Mapping[str, str] = types | {name: each.written.format for name, each in self._quantised.items()}

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def stored_bytes(self, name: str) -> int:
        quantised = self._quantised.get(name)
        return (
            self._tensors[name].nbytes if quantised is None else sum(each.nbytes for each in quantised.parts.values())
        )

    def read_rows(self, name: str, start: int, out: Array) -> None:
        if (quantised := self._quantised.get(name)) is not None:
            values = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
            quantised.written.decode(self._raw(quantised, Span(start, start + len(out))), values, start)
        else:
            tensor = self._tensors[name]
            if tensor.format in _INTEGERS and out.dtype == np.float32:
                out[...] = (
                    self._bytes(tensor, Span(start, start + len(out))).view(_INTEGERS[tensor.format]).reshape(out.shape)
                )
                return
            if tensor.format not in _SAME_AS_STORED:
                raise WeightsError(
                    f"{self._paths[tensor.file]}: tensor {name} is {tensor.format}, which is not supported "
                    f"({', '.join(_SAME_AS_STORED)}, or what belongs to a quantised weight)"
                )
            if out.dtype == _SAME_AS_STORED[tensor.format]:
                self._read(tensor, start, out.view(np.uint8))
                return
            values = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
            dequantize(self._bytes(tensor, Span(start, start + len(out))), FORMATS[tensor.format], values)
        if values is not out:
            store(values, out)

    def read_stored(self, name: str, start: int, stop: int) -> dict[str, Bytes]:
        if (quantised := self._quantised.get(name)) is not None:
            span = Span(start, stop)
            return quantised.written.stored_form(self._raw(quantised, span), span)
        return {"weight": self._bytes(self._tensors[name], Span(start, stop))}

    def whole(self, name: str) -> bool:
        return name in self._quantised and self._quantised[name].written.whole

    def columns(self, name: str, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        if (quantised := self._quantised.get(name)) is None:
            raise WeightsError(f"{name}: columns of weights in {self.types[name]} cannot be divided")
        try:
            return quantised.written.columns(arrays, span)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error}") from error

    def _raw(self, quantised: _Quantised, span: Span) -> dict[str, Bytes]:
        found = {}
        for role, part in quantised.parts.items():
            rows = quantised.written.rows(role, span)
            found[role] = self._bytes(part, Span(0, part.shape[0] if part.shape else 1) if rows is None else rows)
        return found

    def _bytes(self, tensor: _Stored, span: Span) -> Bytes:
        rows = np.empty((span.stop - span.start, tensor.row_bytes), np.uint8)
        self._read(tensor, span.start, rows)
        return rows

    def _read(self, tensor: _Stored, start: int, into: Bytes) -> None:
        read_exactly(self._fds[tensor.file], into, tensor.offset + start * tensor.row_bytes, self._paths[tensor.file])

    def _whole_tensor(self, name: str) -> bytes:
        tensor = self._tensors[name]
        return self._bytes(tensor, Span(0, tensor.shape[0] if tensor.shape else 1)).tobytes()

    def _put_together(self, schemes: Sequence[Scheme] = UNCONFIGURED) -> dict[str, _Quantised]:
        """Replace the tensors of quantised weights by one entry per weight, and return these weights by name."""
        tensors = {name: StoredTensor(tensor.format, tensor.shape) for name, tensor in self._tensors.items()}
        stored = StoredTensors(tensors, self._whole_tensor, self._metadata)
        found = {}
        for scheme in schemes:
            for composite in scheme.composites(stored):
                parts = {role: self._tensors[name] for role, name in composite.tensors.items()}
                found[composite.name] = (
                    _Quantised(composite.written, composite.shape, parts),
                    composite.tensors.values(),
                )
        for _, names in found.values():
            for name in names:
                self._tensors.pop(name, None)
        ends = tuple(end for scheme in schemes for end in scheme.ignored)
        if found:
            self._tensors = {name: tensor for name, tensor in self._tensors.items() if not name.endswith(ends)}
        return {name: quantised for name, (quantised, _) in found.items()}

    def _open(self, path: Path, names: set[str] | None, prefix: str = "") -> None:
        """Open a file and check its header. `names`: tensors that it must contain according to the index; None without an index.
        `prefix`: added to the names."""
        try:
            fd = os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # opening a pipe without a writer would block forever
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
        self._fds.append(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise WeightsError(f"{path}: is not a file")
        self._paths.append(path)
        tensors, metadata = _read_header(path, fd, len(self._fds) - 1)
        self._metadata |= metadata
        if lost := (names or set()) - set(tensors):
            raise WeightsError(f"{path}: {sorted(lost)[0]} should be there according to {INDEX}")
        self._tensors |= {f"{prefix}{name}": tensors[name] for name in (tensors if names is None else names)}


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Return the files to read, each with the tensors that the index lists for it."""
    if (single := folder / "model.safetensors").exists():
        return {single: None}
    if (index := folder / INDEX).exists():
        return _shards(index)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise WeightsError(f"{folder}: several .safetensors files, but no {INDEX} that says what is where")
    if pickles := sorted(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise WeightsError(
            f"{folder}: only pickle files ({pickles[0].name}), which are never loaded because they can run code; "
            "convert the model to safetensors"
        )
    raise WeightsError(f"{folder}: no .safetensors files (weights in pickle files are neither fetched nor read)")


def _shards(index: Path) -> dict[Path, set[str] | None]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index}: not an index of safetensors files: {error!r}") from error
    shards: dict[Path, set[str] | None] = {}
    for name, file in pairs:
        if Path(file).name != file or "\0" in file:
            raise WeightsError(f"{index}: {name} refers to {file!r}, which is not a file beside it")
        names = shards.setdefault(index.parent / file, set())
        assert names is not None
        names.add(name)
    return shards


def _read_header(path: Path, fd: int, file: int) -> tuple[dict[str, _Stored], dict[str, str]]:
    size = os.fstat(fd).st_size
    prefix = np.empty(min(8, size), np.uint8)
    read_exactly(fd, prefix, 0, path)
    length = int.from_bytes(prefix.tobytes(), "little")
    if size < 8 or length > min(_MAX_HEADER, size - 8):
        raise WeightsError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
    text = np.empty(length, np.uint8)
    read_exactly(fd, text, 8, path)
    try:
        header = json.loads(text.tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        texts = {str(name): str(text) for name, text in (header.get("__metadata__") or {}).items()}
        return {name: _stored(entry, file, 8 + length, size) for name, entry in entries.items()}, texts
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: broken safetensors header: {error}") from error


def _stored(entry: Mapping[str, Any], file: int, data_start: int, size: int) -> _Stored:
    kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{entry} has an invalid shape or offset")
    if not begin <= end <= size - data_start:
        raise ValueError(f"{entry} goes past the end of the file at byte {size}: cut short?")
    size_of_one = FORMATS[kind].size if kind in _SAME_AS_STORED else _BYTES.get(kind)
    if size_of_one is not None and prod(shape) * size_of_one != end - begin:
        raise ValueError(f"{entry} is not as long as its shape says")
    return _Stored(file, str(kind), shape, data_start + begin, end - begin)
