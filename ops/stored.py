"""StoredWeight: a matrix in its checkpoint's format, before it is prepared for a kernel.

A format is data. Block sizes and tables of codes are in formats.json. The tables are those of QLoRA (NF4, Dettmers et al. 2023),
bitsandbytes (FP4) and the Open Compute Project (E2M1). csrc/generate.py generates C++ from them, and numpy code reads them in
runtime/weights/dequantize.py. Each kernel's `supports` lists its formats. This module is independent of weight files and
kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, order=True)
class WeightFormat:
    """Format of a matrix's numbers. `name`: torch's name of a dtype ("bfloat16"), or ggml's name of a block type ("Q4_K", "MXFP4").
    "int8" and "int16" mean plain numbers that the kernel rounds to 8 or 16 bits. Formats with more parameters, such as group sizes,
    derive from this class."""

    name: str

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the torch dtype of plain numbers; None for other formats."""
        return DENSE.get(self.name)

    def __str__(self) -> str:
        return self.name


INT8, INT16 = WeightFormat("int8"), WeightFormat("int16")

# Codes with one scale per group of columns of each row: a value is (code - zero) * scale. All groups of a row have the same
# size, columns / groups. By role: "weight", for fp8 [rows, columns] float8_e4m3fn, for w8 the same in int8, for w4
# [rows, columns / 2] uint8, the code of an even column in the low half of a byte; "scales" [rows, groups] float32; "zeros"
# [rows, groups] uint8 of w4, if they are not 8; "order" [columns] int32, if columns are not in x's order: position p is
# column order[p].
FP8, W8, W4 = WeightFormat("fp8"), WeightFormat("w8"), WeightFormat("w4")

# Codes that are decoded before multiplication: a value is the code's number times its scale, less a minimum if there are
# any. "weight": for q8 [rows, columns] int8, for others [rows, columns / 2] as for w4; a code of q4 is 0 to 15, of q8 a signed
# number, of others an index into TABLES. "scales" and "mins" [rows, groups]; "super_scales" and "super_mins"
# [rows, coarser groups], which multiply them. Scales are float32. With super_scales, those of e2m1 are
# float8_e4m3fn and those of others integers; converted blocks keep the dtypes of their blocks.
NF4, FP4, E2M1, Q4, Q8 = (WeightFormat(name) for name in ("nf4", "fp4", "e2m1", "q4", "q8"))
_WRITTEN = json.loads(Path(__file__).with_name("formats.json").read_text())
TABLES: Mapping[WeightFormat, tuple[float, ...]] = {
    WeightFormat(name): tuple(numbers) for name, numbers in _WRITTEN["tables"].items()
}


class BlockFormat(NamedTuple):
    """ggml block type that is converted to codes: `columns` numbers in `size` bytes become `codes` with `groups` scales."""

    columns: int
    size: int
    codes: WeightFormat
    groups: int
    on_cpu: bool  # whether compiled CPU kernels support it


BLOCKS: Mapping[WeightFormat, BlockFormat] = {
    WeightFormat(name): BlockFormat(
        each["columns"], each["bytes"], WeightFormat(each["codes"]), each["groups"], "bits" in each
    )
    for name, each in _WRITTEN["blocks"].items()
    if "codes" in each
}
FOUR_BITS = frozenset({W4, Q4, *TABLES})
DECODED = frozenset({Q4, Q8, *TABLES})
CODED = frozenset({FP8, W8, W4}) | DECODED
_WEIGHT_TYPES = {FP8: torch.float8_e4m3fn, W8: torch.int8, Q8: torch.int8}
_FLOATS = ("scales", "mins", "super_scales", "super_mins")
_TYPES = {**dict.fromkeys(_FLOATS, torch.float32), "order": torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """Rows of a matrix, as tensors by role. "weight" is [rows, columns] of plain numbers, or [rows, bytes of a row] uint8 of
    blocks. Its format may have further roles ("scales", "zeros", "order", "mins"). "bias" [rows] is present if the layer has one.
    For `LinearWeight.refill`, "bias" may be the only role."""

    format: WeightFormat
    tensors: Mapping[str, Tensor]

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> StoredWeight:
        """Create from plain numbers: weight [rows, columns], bias [rows] or None."""
        return cls(WeightFormat(str(weight.dtype).removeprefix("torch.")), {"weight": weight}).with_bias(bias)

    @classmethod
    def int8(cls, weight: Tensor, bias: Tensor | None = None) -> StoredWeight:
        """Create from plain numbers, weight [rows, columns], that the kernel rounds to 8 bits."""
        return cls(INT8, {"weight": weight}).with_bias(bias)

    @classmethod
    def int16(cls, weight: Tensor, bias: Tensor | None = None) -> StoredWeight:
        """Create from plain numbers, weight [rows, columns], that the kernel rounds to 16 bits."""
        return cls(INT16, {"weight": weight}).with_bias(bias)

    @classmethod
    def blocks(cls, kind: str, rows: Tensor, bias: Tensor | None = None) -> StoredWeight:
        """Create from rows [rows, bytes of a row] uint8 of ggml's blocks. `kind`: block type ("Q4_1")."""
        return cls(WeightFormat(kind), {"weight": rows}).with_bias(bias)

    @classmethod
    def as_written(cls, kind: str, rows: Mapping[str, Tensor]) -> StoredWeight:
        """Create from bytes by role, each [rows, bytes of a row] uint8. `kind`: ggml's block type, or a format with codes and
        scales."""
        written = WeightFormat(kind)
        types = _TYPES | {"weight": _WEIGHT_TYPES.get(written, torch.uint8)} if written in CODED else {}
        if written == E2M1 and "super_scales" in rows:
            types = types | {"scales": torch.float8_e4m3fn}
        tensors = {role: each.view(types.get(role, torch.uint8)) for role, each in rows.items()}
        return cls(written, tensors | ({"order": tensors["order"].flatten()} if "order" in tensors else {}))

    def with_bias(self, bias: Tensor | None) -> StoredWeight:
        """Return the same rows with this bias; unchanged if it is None."""
        return self if bias is None else StoredWeight(self.format, {**self.tensors, "bias": bias})

    @property
    def weight(self) -> Tensor:
        return self.tensors["weight"]

    @property
    def bias(self) -> Tensor | None:
        return self.tensors.get("bias")


Stored = StoredWeight | Sequence[StoredWeight]  # several: their rows are stacked, in any formats


def parts_of(stored: Stored) -> tuple[StoredWeight, ...]:
    return (stored,) if isinstance(stored, StoredWeight) else tuple(stored)


def formats_of(parts: Iterable[StoredWeight]) -> tuple[WeightFormat, ...]:
    """Return the distinct formats of the parts, sorted."""
    return tuple(sorted({part.format for part in parts}, key=str))


def bias_of(parts: Iterable[StoredWeight]) -> Tensor | None:
    """Return the biases of all parts, concatenated in new memory; None if no part has one."""
    biases = [part.bias for part in parts if part.bias is not None]
    return torch.cat(biases) if biases else None


def only_dense(stored: Stored, dtype: torch.dtype | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return (weight, bias) of plain parts, joined by rows. Either is None if no part has it, which is possible in a refill. Raises
    ValueError for other formats, or for a dtype other than `dtype`."""
    parts = parts_of(stored)
    for part in parts:
        if part.format.dtype is None or dtype not in (None, part.format.dtype):
            raise ValueError(
                f"a weight in {part.format} where {dtype or 'plain numbers'} are kept".replace("torch.", "")
            )
    weights = [part.weight for part in parts if "weight" in part.tensors]
    biases = [part.bias for part in parts if part.bias is not None]
    return _joined(weights), _joined(biases)


def _joined(tensors: list[Tensor]) -> Tensor | None:
    return None if not tensors else tensors[0] if len(tensors) == 1 else torch.cat(tensors)
