"""Tensors of a GGUF file as a Hugging Face checkpoint: with its names, row order and shapes.

llama.cpp renames tensors during conversion. For the llama architecture it reorders the rows of q and k, so that rotary pairs are
adjacent. It adds 1 to Gemma's norm weights, flattens matrices of one row, and splits DeepSeek's keys and values. This module undoes
all of that. `gguf.py` reads the container, and `gguf_config.py` the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.weights.dequantize import FORMATS, Bytes, Floats, block_columns, dequantize
from runtime.weights.dtypes import Array, store
from runtime.weights.gguf import GgufFile, GgufTensor
from runtime.weights.gguf_config import LONGROPE, ROPE_FACTORS, GGUFMetadata, architecture_of, hf_name
from runtime.weights.rules import Shape, Span, WeightsError

_ONE_ROW = "shared_expert_gate.weight"
_KEYS, _VALUES, _KEYS_AND_VALUES = (f".self_attn.{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True, slots=True)
class _LatentHeads:
    """Matrices that expand DeepSeek's latents: keys [heads, rank, key size] and values [heads, value size, rank]. They appear as
    one matrix with rows of size `rank`, in which each head has the rows of its keys, then those of its values."""

    keys: GgufTensor
    values: GgufTensor

    @property
    def sizes(self) -> tuple[int, int]:
        return self.keys.shape[2], self.values.shape[1]

    @property
    def shape(self) -> Shape:
        return self.keys.shape[0] * sum(self.sizes), self.keys.shape[1]


class GgufCheckpoint:
    """Tensors of a GGUF file by Hugging Face name, an implementation of `stream.TensorReader`. It must be closed. Raises
    WeightsError if a tensor's type is not supported."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file.reopened()
        self._architecture = architecture_of(self._file.metadata)
        self._tensors = {
            (name := hf_name(tensor.name, self._architecture)): _as_matrix(name, tensor)
            for tensor in self._file.tensors.values()
            if tensor.name not in (ROPE_FACTORS, *LONGROPE.values())
        }
        self._head_sizes = _reordered_heads(self._file.metadata, self._tensors)
        if unknown := [tensor for tensor in self._tensors.values() if tensor.type not in FORMATS]:
            self.close()
            raise WeightsError(
                f"{file.path}: tensor {unknown[0].name} is {unknown[0].type}, which is not supported, as are "
                f"{len(unknown) - 1} more tensors; supported types: {', '.join(FORMATS)}"
            )
        self._latent_heads = _latent_heads(self._tensors)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.shapes: Mapping[str, Shape] = shapes | {name: heads.shape for name, heads in self._latent_heads.items()}
        types = {name: tensor.type for name, tensor in self._tensors.items()}
        self.types: Mapping[str, str] = types | dict.fromkeys(self._latent_heads, "F32")

    def close(self) -> None:
        self._file.close()

    def stored_bytes(self, name: str) -> int:
        heads = self._latent_heads.get(name)
        return self._tensors[name].nbytes if heads is None else heads.keys.nbytes + heads.values.nbytes

    def read_rows(self, name: str, start: int, out: Array) -> None:
        if (heads := self._latent_heads.get(name)) is not None:
            store(self._decompressing(heads, start, start + len(out)), out)
            return
        tensor = self._tensors[name]
        raw = self._raw_rows(name, start, start + len(out))
        values = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        dequantize(raw, FORMATS[tensor.type], values)
        if self._architecture is not None and self._architecture.plus_one and name.endswith("norm.weight"):
            values -= 1
        if values is not out:
            store(values, out)

    def read_stored(self, name: str, start: int, stop: int) -> dict[str, Bytes]:
        return {"weight": self._raw_rows(name, start, stop)}

    def whole(self, name: str) -> bool:
        return False

    def columns(self, name: str, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        return {"weight": block_columns(arrays["weight"], FORMATS[self.types[name]], span)}

    def _decompressing(self, heads: _LatentHeads, start: int, stop: int) -> Floats:
        size = sum(heads.sizes)
        first, last = start // size, -(-stop // size)
        parts = []
        for tensor in (heads.keys, heads.values):
            values = np.empty((last - first, *tensor.shape[1:]), np.float32)
            dequantize(self._file.raw_rows(tensor, first, last), FORMATS[tensor.type], values)
            parts.append(values)
        rows = np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1).reshape(-1, heads.shape[1])
        return rows[start - first * size : stop - first * size]

    def _raw_rows(self, name: str, start: int, stop: int) -> Bytes:
        tensor, head_size = self._tensors[name], self._head_sizes.get(name)
        if head_size is None:
            return self._file.raw_rows(tensor, start, stop)
        return self._heads(tensor, start, stop, head_size)

    def _heads(self, tensor: GgufTensor, start: int, stop: int, head_size: int) -> Bytes:
        """Return rows of q or k in Hugging Face order, where the rows of a rotary pair are half a head apart. Blocks never span
        rows."""
        first, last = start // head_size * head_size, -(-stop // head_size) * head_size
        pairs = self._file.raw_rows(tensor, first, last).reshape(-1, head_size // 2, 2, tensor.row_bytes)
        rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(last - first, tensor.row_bytes)
        return rows[start - first : stop - first]


def _as_matrix(name: str, tensor: GgufTensor) -> GgufTensor:
    one_row = name.endswith(_ONE_ROW) and len(tensor.shape) == 1
    return replace(tensor, shape=(1, *tensor.shape)) if one_row else tensor


def _latent_heads(tensors: dict[str, GgufTensor]) -> dict[str, _LatentHeads]:
    found = {}
    for name in [name for name in tensors if name.endswith(_KEYS)]:
        together = name.removesuffix(_KEYS)
        keys, values = tensors[name], tensors.get(together + _VALUES)
        if values is None or len(keys.shape) != 3 or values.shape != (keys.shape[0], values.shape[-2], keys.shape[1]):
            raise WeightsError(f"tensor {keys.name} has no matching tensor of values")
        found[together + _KEYS_AND_VALUES] = _LatentHeads(tensors.pop(name), tensors.pop(together + _VALUES))
    return found


def _reordered_heads(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, int]:
    architecture = architecture_of(metadata)
    if architecture is None or not architecture.reordered:
        return {}
    config = GGUFMetadata("", metadata)
    found = {}
    for name, tensor in tensors.items():
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".self_attn.{projection}." in name:
                count = config.heads()[heads]
                if tensor.shape[0] % (2 * count):
                    raise WeightsError(
                        f"tensor {tensor.name} has {tensor.shape[0]} rows: not {count} heads of even size"
                    )
                found[name] = tensor.shape[0] // count
    return found
