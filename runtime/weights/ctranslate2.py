"""Reader of CTranslate2 model folders (model.bin). The content appears as the Hugging Face checkpoint of Whisper from which it was
converted.

Every length is checked against the file before use, and tensors are read with pread. CTranslate2 stores queries, keys and values as
one tensor; they are returned as ranges of its rows. Integers are divided by the scale of their row, or of the tensor.

Format: ctranslate2/specs/model_spec.py of the ctranslate2 package, binary version 6."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.dtypes import Array, store
from runtime.weights.gguf import read_exactly
from runtime.weights.rules import Shape, Span, WeightsError

MODEL_BIN = "model.bin"
_SPEC = "WhisperSpec"
_VERSIONS = range(2, 7)
_NUMBERS: tuple[tuple[str, Any], ...] = (
    ("F32", np.float32), ("I8", np.int8), ("I16", np.int16), ("I32", np.int32), ("F16", np.float16), ("BF16", np.uint16),
)  # fmt: skip
_MAX_VARIABLES, _MAX_DIMS = 1 << 16, 4

# Rows of a variable, in thirds or halves, under the names of transformers; None: omitted, since these rows are zeros.
_QKV = ("q_proj", "k_proj", "v_proj")
_IN_LAYERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "self_attention/linear_0": ("self_attn", _QKV),
    "self_attention/linear_1": ("self_attn", ("out_proj",)),
    "self_attention/layer_norm": ("self_attn_layer_norm", ()),
    "attention/linear_0": ("encoder_attn", ("q_proj",)),
    "attention/linear_1": ("encoder_attn", ("k_proj", "v_proj")),
    "attention/linear_2": ("encoder_attn", ("out_proj",)),
    "attention/layer_norm": ("encoder_attn_layer_norm", ()),
    "ffn/linear_0": ("fc1", ()),
    "ffn/linear_1": ("fc2", ()),
    "ffn/layer_norm": ("final_layer_norm", ()),
}
_BESIDE_LAYERS: Mapping[str, str] = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "encoder/position_encodings": "model.encoder.embed_positions",
    "decoder/position_encodings": "model.decoder.embed_positions",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "decoder/projection": "proj_out",
}
_ROLES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}


@dataclass(frozen=True, slots=True)
class _Variable:
    shape: Shape
    type: int  # index of _NUMBERS
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a stored variable, from row `first` on, that are one tensor of the checkpoint. `scale`: variable by which they are
    divided."""

    variable: _Variable
    shape: Shape
    first: int
    scale: _Variable | None


class CTranslate2File:
    """Open model.bin, with its variables by name. It must be closed. Raises WeightsError if it is invalid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise WeightsError(f"{path}: is not a file")
            self._size, self._at = status.st_size, 0
            self.variables = self._read_variables()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, variable: _Variable, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a variable as stored. A scalar is one row."""
        rows = np.empty((stop - start, *variable.shape[1:]), _NUMBERS[variable.type][1])
        row_bytes = rows.nbytes // max(1, stop - start)
        read_exactly(self._fd, rows.view(np.uint8), variable.offset + start * row_bytes, self.path)
        return rows

    def number(self, name: str) -> int:
        """Return the integer `name`, which is stored as a variable with one element."""
        variable = self.variables.get(name)
        if variable is None or prod(variable.shape) != 1:
            raise WeightsError(f"{self.path}: has no number {name}")
        return int(self.read(variable, 0, 1)[0])

    def shape(self, name: str) -> Shape:
        if name not in self.variables:
            raise WeightsError(f"{self.path}: has no {name}")
        return self.variables[name].shape

    def _read_variables(self) -> dict[str, _Variable]:
        version = self._int("<I")
        name = self._text() if version in _VERSIONS else ""
        if name != _SPEC:
            raise WeightsError(
                f"{self.path}: a model of CTranslate2's {name or f'format {version}'}; {_SPEC} of formats {_VERSIONS[0]} to "
                f"{_VERSIONS[-1]} is supported"
            )
        self._int("<I")  # revision of the spec, which defines the variables' names
        variables = {}
        for _ in range(self._count()):
            key = self._text()
            dims = self._int("<B")
            if dims > _MAX_DIMS:
                raise WeightsError(f"{self.path}: {key} has {dims} dimensions")
            shape = tuple(self._int("<I") for _ in range(dims))
            number, nbytes = self._int("<B"), self._int("<I")
            if number >= len(_NUMBERS) or prod(shape) * np.dtype(_NUMBERS[number][1]).itemsize != nbytes:
                raise WeightsError(f"{self.path}: {key} is not as long as its shape says")
            if nbytes > self._size - self._at:
                raise WeightsError(f"{self.path}: {key} goes past the end of the file at byte {self._size}: cut short?")
            variables[key] = _Variable(shape, number, self._at, nbytes)
            self._at += nbytes
        for _ in range(self._count() if self._at < self._size else 0):
            alias, key = self._text(), self._text()
            if key in variables and alias != "decoder/projection/weight":
                variables[alias] = variables[key]
        return variables

    def _count(self) -> int:
        count = self._int("<I")
        if count > _MAX_VARIABLES:
            raise WeightsError(f"{self.path}: {count} variables are more than {_MAX_VARIABLES}")
        return count

    def _int(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _text(self) -> str:
        return self._take(self._int("<H")).rstrip(b"\0").decode("utf-8", "replace")

    def _take(self, count: int) -> bytes:
        taken = np.empty(count, np.uint8)
        read_exactly(self._fd, taken, self._at, self.path)
        self._at += count
        return taken.tobytes()


class CTranslate2Checkpoint:
    """Tensors of a model.bin by their Hugging Face names, an implementation of `stream.TensorReader`. It must be closed."""

    def __init__(self, path: Path) -> None:
        self._file = CTranslate2File(path)
        self._rows = dict(self._named())
        self.shapes: Mapping[str, Shape] = {name: rows.shape for name, rows in self._rows.items()}
        self.types: Mapping[str, str] = {name: _type(rows) for name, rows in self._rows.items()}

    def close(self) -> None:
        self._file.close()

    def stored_bytes(self, name: str) -> int:
        rows = self._rows[name]
        return rows.variable.nbytes * rows.shape[0] // max(1, rows.variable.shape[0])

    def read_rows(self, name: str, start: int, out: Array) -> None:
        rows = self._rows[name]
        first = rows.first + start
        values = self._file.read(rows.variable, first, first + len(out))
        if rows.scale is not None:
            scale = self._scale(rows.scale, first, len(out)).reshape(-1, *(1,) * (values.ndim - 1))
            values = values.astype(np.float32) / scale
        elif _NUMBERS[rows.variable.type][0] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if out.dtype == values.dtype:
            out[...] = values
        else:
            store(values.astype(np.float32), out)

    def read_stored(self, name: str, start: int, stop: int) -> dict[str, Bytes]:
        rows = self._rows[name]
        first, last = rows.first + start, rows.first + stop
        codes = self._file.read(rows.variable, first, last).reshape(stop - start, -1).view(np.uint8)
        if rows.scale is None:
            return {"weight": codes}
        scales = (1 / self._scale(rows.scale, first, stop - start)).astype(np.float32)
        return {"weight": codes, "scales": scales.reshape(-1, 1).view(np.uint8)}

    def whole(self, name: str) -> bool:
        return False

    def columns(self, name: str, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        return {**arrays, "weight": arrays["weight"][:, slice(*span)]}

    def _scale(self, scale: _Variable, first: int, count: int) -> Array:
        if prod(scale.shape) == 1:
            return self._file.read(scale, 0, 1).reshape(1).repeat(count)
        return self._file.read(scale, first, first + count)

    def _named(self) -> Iterator[tuple[str, _Rows]]:
        """Yield (transformers' name, rows of a variable) for each weight. Attributes and scales are omitted."""
        for key, variable in self._file.variables.items():
            owner, _, last = key.rpartition("/")
            if last not in _ROLES or not variable.shape:
                continue
            scale = self._file.variables.get(f"{key}_scale")
            if scale is not None and prod(scale.shape) not in (1, variable.shape[0]):
                raise WeightsError(f"{self._file.path}: {key}_scale does not fit {key}")
            names = _names(owner)
            if not names or variable.shape[0] % len(names):
                raise WeightsError(f"{self._file.path}: {key} is not a tensor of Whisper")
            num_rows = variable.shape[0] // len(names)
            for index, name in enumerate(names):
                if not (last == "bias" and name.endswith("k_proj")):  # zeros, which do not exist in transformers
                    shape = (num_rows, *variable.shape[1:])
                    yield f"{name}.{_ROLES[last]}", _Rows(variable, shape, index * num_rows, scale)


def _type(rows: _Rows) -> str:
    """Return the dtype of rows for `TensorReader.types`. Integers with a single scale are read as floats."""
    kind = _NUMBERS[rows.variable.type][0]
    if kind == "I8" and rows.scale is not None and prod(rows.scale.shape) > 1 and len(rows.shape) == 2:
        return "w8"
    return kind if kind in ("F16", "BF16") else "F32"


def _names(owner: str) -> tuple[str, ...]:
    """Return transformers' names of the layers whose rows are stacked in a variable. `owner`: path of the variable without its last
    part."""
    if owner in _BESIDE_LAYERS:
        return (_BESIDE_LAYERS[owner],)
    part, _, below = owner.partition("/layer_")
    number, _, block = below.partition("/")
    if part not in ("encoder", "decoder") or not number.isdecimal() or block not in _IN_LAYERS:
        return ()
    name, parts = _IN_LAYERS[block]
    layer = f"model.{part}.layers.{number}.{name}"
    return tuple(f"{layer}.{each}" for each in parts) or (layer,)


def is_ctranslate2(folder: Path) -> bool:
    """Return whether the folder has a model.bin of CTranslate2. Pickle files may have the same name."""
    try:
        with (folder / MODEL_BIN).open("rb") as file:
            version, length = struct.unpack("<IH", file.read(6))
            name = file.read(min(length, 64))
    except (OSError, struct.error):
        return False
    return version in _VERSIONS and name.endswith(b"Spec\0")


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.json that transformers would need for the model. Raises WeightsError."""
    file = CTranslate2File(folder / MODEL_BIN)
    try:
        vocab_size, d_model = file.shape("decoder/embeddings/weight")
        tokens = _vocabulary(folder)
        found: dict[str, Any] = {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "vocab_size": vocab_size,
            "d_model": d_model,
            "num_mel_bins": file.shape("encoder/conv1/weight")[1],
            "max_source_positions": file.shape("encoder/position_encodings/encodings")[0],
            "max_target_positions": file.shape("decoder/position_encodings/encodings")[0],
            "tie_word_embeddings": "decoder/projection/weight" not in file.variables,
            "eos_token_id": _id(tokens, "<|endoftext|>", folder),
            "decoder_start_token_id": _id(tokens, "<|startoftranscript|>", folder),
        }
        for part in ("encoder", "decoder"):
            layers = {
                name.split("/")[1] for name in file.variables if name.startswith(f"{part}/layer_") and "/" in name
            }
            found[f"{part}_layers"] = len({layer for layer in layers if layer.removeprefix("layer_").isdecimal()})
            found[f"{part}_attention_heads"] = file.number(f"{part}/num_heads")
            found[f"{part}_ffn_dim"] = file.shape(f"{part}/layer_0/ffn/linear_0/weight")[0]
        return found
    finally:
        file.close()


def _vocabulary(folder: Path) -> dict[str, int]:
    listed, lines = folder / "vocabulary.json", folder / "vocabulary.txt"
    try:
        tokens = json.loads(listed.read_bytes()) if listed.exists() else lines.read_text("utf-8").split("\n")
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{folder}: no vocabulary.json or vocabulary.txt that can be read: {error}") from error
    return {token: index for index, token in enumerate(tokens) if isinstance(token, str)}


def _id(tokens: Mapping[str, int], token: str, folder: Path) -> int:
    if token not in tokens:
        raise WeightsError(f"{folder}: its vocabulary has no {token}")
    return tokens[token]
