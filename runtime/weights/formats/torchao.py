"""Scheme of torchao's safetensors: a weight is split into tensors, and the file header's metadata describes its type.

The metadata `NAME.weight` is JSON with `_type`, and with `block_size` in `_data`. Int8Tensor: `NAME._weight_qdata` [N, K] I8,
`_weight_scale` and `_weight_zero_point` [N, groups]. IntxUnpackedToInt8Tensor: the same, with fewer bits used per byte.
Float8Tensor: qdata [N, K] F8_E4M3 with the scales of fp8.py. Int4Tensor: qdata [N, K / 2], signed, the first code in the lower
half; `_weight_scale` and `_weight_zero_point` [groups, N], where the zero point is the value of code 0. Activations are in 16 bits
or quantised, as kernels choose, regardless of torchao's setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import Q4, Q8, W4, W8, Coded, as_floats, in_bytes, paired
from runtime.weights.formats.fp8 import fp8_written
from runtime.weights.formats.scheme import Composite, StoredTensor, StoredTensors, Written
from runtime.weights.rules import Shape, Span, WeightsError

_EIGHT = np.uint8(8)
_NAMES = "tensor_names"  # metadata key: names of the described tensors
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Int4Written(Coded):
    """Int4 weight of torchao. `dtype`: dtype of scales and zero values."""

    dtype: str

    def rows(self, role: str, span: Span) -> Span | None:
        return span if role == "weight" else None

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        scales, zero = (as_floats(raw[role], self.dtype).T[slice(*span)] for role in ("scales", "zeros"))
        weight = raw["weight"].reshape(span.stop - span.start, -1) ^ (_EIGHT | _EIGHT << 4)  # from -8 .. 7 to 0 .. 15
        return {"weight": weight, "scales": in_bytes(scales), "mins": in_bytes(np.float32(8) * scales - zero)}


@dataclass(frozen=True, slots=True)
class UnpackedWritten(Coded):
    """Weight with one byte per number. `dtype`: dtype of scales. `zeros`: True if some zero points are not 0."""

    dtype: str
    zeros: bool

    def rows(self, role: str, span: Span) -> Span | None:
        return span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        scales = as_floats(raw["scales"].reshape(span.stop - span.start, -1), self.dtype)
        found: dict[str, Bytes] = {"weight": raw["weight"], "scales": in_bytes(scales)}
        zeros = raw["zeros"].reshape(scales.shape).view(np.int8)
        if self.codes == W4:
            found["weight"] = paired((raw["weight"].view(np.int8) + np.int8(8)).view(np.uint8))
            found["zeros"] = np.ascontiguousarray((zeros + np.int8(8)).view(np.uint8))
        elif self.zeros:
            found["mins"] = in_bytes(zeros * scales)
        return found


class TorchAo:
    """Scheme of torchao's safetensors."""

    ignored = ()

    def __init__(self, section: Mapping[str, Any]) -> None:
        """Create the scheme. The config's `section` is unused, since each tensor describes itself."""

    def composites(self, stored: StoredTensors) -> Iterator[Composite]:
        for name, text in stored.metadata.items():
            base, dot, last = name.rpartition(".")
            if name == _NAMES or f"{base}{dot}_{last}_qdata" not in stored:
                continue
            try:
                yield _found(stored, name, f"{base}{dot}_{last}_", json.loads(text))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise WeightsError(f"{name}: its metadata does not say how it is written: {error!r}") from error


def _found(stored: StoredTensors, name: str, prefix: str, said: Mapping[str, Any]) -> Composite:
    kind, facts = str(said["_type"]), said["_data"]
    if kind not in _KINDS or f"{prefix}act_pre_scale" in stored:
        beside = " with scales of activations" if kind in _KINDS else ""
        raise WeightsError(f"{name}: a torchao {kind}{beside} is not supported")
    tensors = {"weight": f"{prefix}qdata", "scales": f"{prefix}scale"}
    if f"{prefix}zero_point" in stored:
        tensors["zeros"] = f"{prefix}zero_point"
    found = {role: stored[each] for role, each in tensors.items()}
    if found["scales"].dtype not in _FLOATS or len(found["weight"].shape) != 2:
        raise ValueError(f"codes {list(found['weight'].shape)} with scales in {found['scales'].dtype}")
    zeros = stored.read(tensors["zeros"]) if "zeros" in tensors and found["zeros"].dtype == "I8" else b""
    shape, written = _KINDS[kind](found, facts, any(zeros))
    return Composite(name, shape, tensors, written)


def _int4(found: Mapping[str, StoredTensor], facts: Mapping[str, Any], zeros: bool) -> tuple[Shape, Written]:
    num_rows, num_columns = found["weight"].shape[0], found["weight"].shape[1] * 2
    groups = num_columns // int(facts["block_size"][-1])
    if not found["scales"] == found["zeros"] == StoredTensor(found["scales"].dtype, (groups, num_rows)):
        raise ValueError(f"scales are {list(found['scales'].shape)}, not {groups} groups of {num_rows} rows")
    return (num_rows, num_columns), Int4Written(Q4, num_columns, groups, found["scales"].dtype)


def _unpacked(
    found: Mapping[str, StoredTensor], facts: Mapping[str, Any], zeros: bool
) -> tuple[Shape, Written]:  # fmt: skip
    num_rows, num_columns = found["weight"].shape
    groups = num_columns // int(facts["block_size"][-1])
    if found["scales"].shape != (num_rows, groups) or found["zeros"] != StoredTensor("I8", (num_rows, groups)):
        raise ValueError(f"scales are {list(found['scales'].shape)}, not {num_rows} rows of {groups} groups")
    four = (facts.get("target_dtype") or {}).get("_data") == "int4"
    codes = W4 if four else Q8 if zeros else W8
    return (num_rows, num_columns), UnpackedWritten(codes, num_columns, groups, found["scales"].dtype, zeros)


def _fp8(found: Mapping[str, StoredTensor], facts: Mapping[str, Any], zeros: bool) -> tuple[Shape, Written]:
    num_rows, num_columns = found["weight"].shape
    rows, columns = (int(size) for size in facts["block_size"])
    written = fp8_written((num_rows, num_columns), found["scales"], (rows, columns))
    if found["weight"].dtype != "F8_E4M3" or written is None:
        raise ValueError(f"{found['weight'].dtype} with scales {list(found['scales'].shape)}")
    return (num_rows, num_columns), written


_Describe = Callable[[Mapping[str, StoredTensor], Mapping[str, Any], bool], tuple[Shape, Written]]
_KINDS: Mapping[str, _Describe] = {
    "Int4Tensor": _int4, "Int8Tensor": _unpacked, "IntxUnpackedToInt8Tensor": _unpacked, "Float8Tensor": _fp8,
}  # fmt: skip
SCHEMES = {"torchao": TorchAo}
