"""GGUF files by hand, so that tests can lie in any field of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, code: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", code) + value


def array(item: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", item, count) + values


def tensor(name: str, dims: Sequence[int], code: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = struct.pack(
        "<QQ",
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = magic + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def example() -> tuple[bytes, np.ndarray]:
    """A small whole file: some metadata, one float32 tensor "weight" of shape [3, 4], which is returned beside it."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    keys = [
        key("general.architecture", 8, string("llama")),
        key("llama.block_count", 4, struct.pack("<I", 2)),
        key("tokenizer.ggml.tokens", 9, array(8, 3, string("a") + string("é") + string(""))),
        key("tokenizer.ggml.scores", 9, array(6, 2, struct.pack("<2f", 0.5, -1))),
        key("nested", 9, array(9, 2, array(7, 1, b"\1") + array(4, 0, b""))),
    ]
    return gguf(keys, [tensor("weight", [4, 3])], values.tobytes()), values
