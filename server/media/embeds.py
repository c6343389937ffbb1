"""Reader and writer of embeddings that the client has computed. They are a safetensors file; a pickle could execute code.

The file has one array of vectors [N, W], float32, float16 or bfloat16. For images and videos of models with grid positions
(Qwen-VL) the file also has the grid, `image_grid_thw` or `video_grid_thw`, int64."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final

import numpy as np

from runtime.api import EMBEDS, MediaItem
from server.http.errors import InvalidMedia, clip

_GRIDS: Final = ("image_grid_thw", "video_grid_thw")
_MAX_HEAD_BYTES: Final = 1 << 16
_MAX_TENSORS: Final = 8
_TYPES: Final[Mapping[str, str]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_NO_FILE: Final = "its data is no safetensors file, which embeddings have to be"

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def read_embeds(data: bytes, where: str) -> dict[str, Array]:
    """Read a safetensors file of embeddings. Return its arrays by name: the vectors, float32 [N, W], under the key EMBEDS, and
    the grid, int64 [1, 3], under its own name. Raises InvalidMedia for the field `where`."""
    tensors = dict(_tensors(data, where))
    vectors = {name: each for name, each in tensors.items() if name not in _GRIDS}
    if len(vectors) != 1:
        raise InvalidMedia(f"it has {len(vectors)} arrays; exactly one with embeddings is required", where)
    ((name, found),) = vectors.items()
    if found.dtype.kind != "f" or found.ndim != 2 or not found.size:
        raise InvalidMedia(f"{clip(name)} is {found.dtype} {list(found.shape)}, not numbers [tokens, width]", where)
    if not np.isfinite(found).all():
        raise InvalidMedia(f"{clip(name)} contains NaN or infinity", where)
    read: dict[str, Array] = {EMBEDS: found}
    for name in _GRIDS & tensors.keys():
        grid = tensors[name]
        if grid.dtype.kind != "i" or grid.size != 3:
            raise InvalidMedia(f"{name} is {grid.dtype} {list(grid.shape)}, not three counts", where)
        read[name] = grid.reshape(1, 3).astype(np.int64)
    return read


def prompt_item(data: bytes, where: str) -> MediaItem:
    """Return a media item for a prompt that consists only of the embeddings in the file `data`. Raises InvalidMedia."""
    vectors = read_embeds(data, where)[EMBEDS]
    positions = np.arange(len(vectors), dtype=np.int32)
    return MediaItem(EMBEDS, sha256(b"prompt:" + data).digest(), positions, {EMBEDS: vectors})


def stored(arrays: Mapping[str, Any], where: str) -> bytes:
    """Return the arrays or tensors as a safetensors file: vectors [N, W] or [1, N, W], and grids. Raises ValueError."""
    head: dict[str, Any] = {}
    body = b""
    for name, value in arrays.items():
        array = _array(value, name, where)
        kind = "F32" if array.dtype.kind == "f" else "I64"
        data = np.ascontiguousarray(array, _TYPES[kind]).tobytes()
        head[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (len(body), len(body) + len(data))}
        body += data
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + body


def _array(value: Any, name: str, where: str) -> Array:
    if hasattr(value, "detach"):  # torch's, of which numpy does not know bfloat16
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{where}: {name} is {type(value).__name__}, not an array of numbers")
    return array[0] if array.ndim == 3 and len(array) == 1 else array


def _tensors(data: bytes, where: str) -> Iterator[tuple[str, Array]]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEAD_BYTES, len(data) - 8):
        raise InvalidMedia(_NO_FILE, where)
    try:
        head = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        raise InvalidMedia(_NO_FILE, where) from None
    if not isinstance(head, dict):
        raise InvalidMedia(_NO_FILE, where)
    head.pop("__metadata__", None)
    if len(head) > _MAX_TENSORS:
        raise InvalidMedia(f"it has {len(head)} arrays; at most {_MAX_TENSORS} are allowed", where)
    body = memoryview(data)[8 + size :]
    for name, entry in head.items():
        yield name, _tensor(body, entry, f"{clip(name)} in the safetensors file", where)


def _tensor(body: memoryview, entry: Any, what: str, where: str) -> Array:
    if not isinstance(entry, dict):
        raise InvalidMedia(f"{what} has no valid description", where)
    kind = str(entry.get("dtype"))
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if kind not in _TYPES:
        raise InvalidMedia(f"{what} is of type {clip(kind)}; {', '.join(_TYPES)} are read", where)
    if not (_counts(shape) and len(shape) <= 4 and 0 not in shape and _counts(span) and len(span) == 2):
        raise InvalidMedia(f"{what} has no shape or no data offsets", where)
    dtype = np.dtype(_TYPES[kind])
    num_bytes = dtype.itemsize
    for each in shape:
        num_bytes *= each
    start, end = span
    if end - start != num_bytes or end > len(body):
        raise InvalidMedia(
            f"{what} has {end - start} bytes in a file of {len(body)}, and {num_bytes} by its shape", where
        )
    found: Array = np.frombuffer(body[start:end], dtype).reshape(shape)
    if kind == "BF16":
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32) if dtype.kind == "f" else found


def _counts(given: Any) -> bool:
    return isinstance(given, list) and all(type(each) is int and 0 <= each < 1 << 40 for each in given)
