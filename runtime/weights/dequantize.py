"""Dequantisation of GGUF blocks with numpy: bit-identical to the `gguf` package and several times faster.

Work is split into slices that fit in the CPU cache, and no temporary array is much larger than a slice. numpy releases the GIL, so
threads run in parallel. Block layouts and code tables are in ops/formats.json, which is read by its path because importing `ops`
would load torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SLICE = 1 << 16  # weights per slice: 256 KiB of float32


def _written() -> Any:
    return json.loads((Path(__file__).parents[2] / "ops" / "formats.json").read_text())


_WRITTEN = _written()
TABLES = {name: np.array(numbers, np.float32) for name, numbers in _WRITTEN["tables"].items()}


@dataclass(frozen=True, slots=True)
class GgmlType:
    """Block type of ggml: a block has `weights` values in `size` bytes. `codes`: format of the codes to which kernels convert
    blocks; None for plain numbers."""

    name: str
    weights: int
    size: int
    codes: str | None


TYPES_BY_ID = {
    each["id"]: GgmlType(name, each["columns"], each["bytes"], each.get("codes"))
    for name, each in _WRITTEN["blocks"].items()
}
FORMATS = {
    each.name: each for each in TYPES_BY_ID.values() if each.codes is not None or each.name in ("F32", "F16", "BF16")
}


def dequantize(raw: Bytes, block_format: GgmlType, out: Floats) -> None:
    """Decode `raw`, the contiguous bytes of whole blocks, into `out` float32, in C order."""
    blocks = raw.reshape(-1, block_format.size)
    values = out.reshape(-1, block_format.weights)
    step = max(1, _SLICE // block_format.weights)
    for start in range(0, len(blocks), step):
        _decode(blocks[start : start + step], block_format, values[start : start + step])


def _decode(blocks: Bytes, block_format: GgmlType, out: Floats) -> None:
    if block_format.name == "BF16":
        np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif block_format.codes is None:
        out[...] = blocks.view("<f4" if block_format.name == "F32" else "<f2")
    else:
        from ops.blocks import decode

        codes, roles, zero = decode(block_format.name, blocks, np)
        table = TABLES.get(block_format.codes)
        out[...] = codes if table is None else (2 * table + 0.0)[codes]  # avoids -0, as ggml does
        if zero:
            out -= zero
        groups = out.reshape(len(out), roles["scales"].shape[1], -1)
        groups *= _of_groups(roles, "scales")
        if "adds" in roles:
            groups += roles["adds"].astype(np.float32)[:, :, None]
        if "mins" in roles:
            groups -= _of_groups(roles, "mins")


def _of_groups(roles: dict[str, Any], role: str) -> Floats:
    fine: Floats = roles[role].astype(np.float32)
    if f"super_{role}" in roles:
        fine = roles[f"super_{role}"].astype(np.float32) * fine
    return fine[:, :, None]


def block_columns(rows: Bytes, block_format: GgmlType, columns: tuple[int, int]) -> Bytes:
    """Return columns [first, last) of rows of blocks [rows, bytes]. `first` and `last` must be multiples of the block size."""
    first, last = (each // block_format.weights * block_format.size for each in columns)
    return np.ascontiguousarray(rows[:, first:last])
