"""Scheme of compressed-tensors, formats float-quantized, int-quantized, naive-quantized, pack-quantized, nvfp4-pack-quantized,
mxfp4-pack-quantized and mxfp8-quantized.

fp8.py reads FP8, nvfp4.py NVFP4 and mxfp4.py MXFP4. Integers: `NAME.weight` [N, K] I8 with `weight_scale` [1], [N] or [N, groups],
and an optional `weight_zero_point` I8 of the same shape. Packed: `weight_packed` [N, K / codes per word] I32, `weight_scale` as
before, `weight_zero_point` [N / codes per word, groups] I32 (I8 with a single scale), and `weight_g_idx` [K] I32 for reordered
columns. Quantised layers are recognised by their tensors. The bits of packed codes are those of the config group whose targets
match the layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes, Floats
from runtime.weights.formats import mxfp4, nvfp4
from runtime.weights.formats.codes import (
    Q8,
    W4,
    W8,
    Coded,
    along_columns,
    along_rows,
    as_floats,
    as_weight,
    in_bytes,
    in_groups,
)
from runtime.weights.formats.fp8 import ACTIVATIONS, Fp8, mxfp8
from runtime.weights.formats.scheme import Composite, StoredTensor, StoredTensors, UnreadScheme
from runtime.weights.rules import Span

_FORMATS = frozenset({
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision",
})  # fmt: skip
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Int8Written(Coded):
    """Int8 weight. `one`: it has a single scale for all rows. `dtype`: dtype of scales."""

    one: bool
    dtype: str

    def rows(self, role: str, span: Span) -> Span | None:
        return None if role != "weight" and self.one else span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        scales = _scales(raw, self.dtype)
        found = {"weight": raw["weight"], "scales": in_bytes(scales)}
        if "zeros" in raw:
            found["mins"] = in_bytes(_signed(raw["zeros"]) * scales)
        return found


@dataclass(frozen=True, slots=True)
class PackedWritten(Coded):
    """Packed weight. `one`: it has a single scale for all rows. `dtype`: dtype of scales."""

    one: bool
    dtype: str

    def rows(self, role: str, span: Span) -> Span | None:
        return span if role == "weight" or (role == "scales" and not self.one) else None

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        bits = 4 if self.codes == W4 else 8
        codes, scales = along_rows(raw["weight"], bits), _scales(raw, self.dtype)
        found: dict[str, Bytes] = {"scales": in_bytes(scales)}
        if "zeros" in raw:
            middle = np.float32(1 << bits - 1)
            if self.one:
                zeros = _signed(raw["zeros"])
            else:
                zeros = along_columns(raw["zeros"], bits).T[slice(*span)] - middle
            if bits == 4:
                found["zeros"] = np.broadcast_to(zeros + middle, scales.shape).astype(np.uint8)
            else:
                found["mins"] = in_bytes(zeros * scales)
        order = None if "order" not in raw else in_groups(raw["order"].view(np.int32).reshape(-1), self.groups)
        if order is not None:
            codes = codes[:, order]
            found["order"] = in_bytes(order[None])
        return found | {"weight": as_weight(codes, self.codes)}


def _scales(raw: Mapping[str, Bytes], dtype: str) -> Floats:
    scales, num_rows = as_floats(raw["scales"].reshape(len(raw["scales"]), -1), dtype), len(raw["weight"])
    return scales if len(scales) == num_rows else scales.repeat(num_rows, 0)


def _signed(zeros: Bytes) -> Floats:
    return zeros.reshape(len(zeros), -1).view(np.int8).astype(np.float32)


class CompressedTensors:
    """Scheme of compressed-tensors. Raises UnreadScheme."""

    ignored = (*ACTIVATIONS, ".weight_shape", ".input_global_scale")

    def __init__(self, section: Mapping[str, Any]) -> None:
        groups = [each for each in (section.get("config_groups") or {}).values() if isinstance(each, Mapping)]
        for written in {section.get("format"), *(each.get("format") for each in groups)} - {None}:
            if written not in _FORMATS:
                raise UnreadScheme(f"in the format {written}")
        if (section.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UnreadScheme("that are sparse, too")
        if section.get("transform_config"):
            raise UnreadScheme("with transforms around them")
        weights = [each.get("weights") or {} for each in groups]
        self._bits = [(_targets(each), args.get("num_bits")) for each, args in zip(groups, weights, strict=True)]
        for _, bits in self._bits:
            if bits not in (4, 8):
                raise UnreadScheme(f"in {bits} bits")
        if any(args.get("type") == "int" and args.get("strategy") == "block" for args in weights):
            raise UnreadScheme("in integers with a scale a block of rows and columns")
        blocks = [args["block_structure"] for args in weights if isinstance(args.get("block_structure"), list)]
        self._fp8 = Fp8({"weight_block_size": blocks[0]} if blocks else {})

    def composites(self, stored: StoredTensors) -> Iterator[Composite]:
        yield from self._fp8.composites(stored)
        yield from mxfp8(stored)
        yield from nvfp4.of_compressed_tensors(stored)
        yield from mxfp4.of_compressed_tensors(stored)
        for name, tensor in stored.items():
            made = (
                self._packed(name, tensor, stored) if name.endswith(".weight_packed") else _int8(name, tensor, stored)
            )
            if made is not None:
                yield made

    def _packed(self, name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> Composite | None:
        base = name.removesuffix(".weight_packed")
        scales, bits = stored.get(f"{base}.weight_scale"), self._bits_of(base)
        if (
            tensor.dtype != "I32"
            or len(tensor.shape) != 2
            or scales is None
            or bits is None
            or scales.dtype not in _FLOATS
        ):
            return None
        num_rows, num_columns = tensor.shape[0], tensor.shape[1] * 32 // bits
        one = _is_one(scales, num_rows)
        groups = 1 if one or len(scales.shape) < 2 else scales.shape[1]
        if (not one and scales.shape != (num_rows, groups)) or num_columns % groups:
            return None
        tensors = {"weight": name, "scales": f"{base}.weight_scale"}
        for role, end in (("zeros", ".weight_zero_point"), ("order", ".weight_g_idx")):
            if base + end in stored:
                tensors[role] = base + end
        if "zeros" in tensors and stored[tensors["zeros"]].dtype != ("I8" if one else "I32"):
            return None  # the remaining tensors are reported as surplus
        codes = W4 if bits == 4 else Q8 if "zeros" in tensors else W8
        written = PackedWritten(codes, num_columns, groups, one, scales.dtype)
        return Composite(f"{base}.weight", (num_rows, num_columns), tensors, written)

    def _bits_of(self, layer: str) -> int | None:
        """Return the bits per code of `layer`: of the config group that names it, else of the group for all linear layers, else of
        the first group."""
        named = [bits for targets, bits in self._bits if any(_is_named(layer, target) for target in targets)]
        general = [bits for targets, bits in self._bits if "Linear" in targets]
        found = named or general or [bits for _, bits in self._bits[:1]]
        return found[0] if found else None


def _targets(group: Mapping[str, Any]) -> Sequence[str]:
    return [str(each) for each in group.get("targets") or ()]


def _is_named(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return layer == target or layer.endswith(f".{target}")


def _is_one(scales: StoredTensor, num_rows: int) -> bool:
    return prod(scales.shape) == 1 and num_rows > 1


def _int8(name: str, tensor: StoredTensor, stored: StoredTensors) -> Composite | None:
    scales = stored.get(f"{name}_scale")
    if tensor.dtype != "I8" or len(tensor.shape) != 2 or scales is None or scales.dtype not in _FLOATS:
        return None
    num_rows, num_columns = tensor.shape
    one = _is_one(scales, num_rows)
    groups = 1 if one or len(scales.shape) < 2 else scales.shape[1]
    if not one and scales.shape not in ((num_rows,), (num_rows, groups)):
        return None
    tensors, zeros = {"weight": name, "scales": f"{name}_scale"}, f"{name}_zero_point"
    if zeros in stored and any(stored.read(zeros)):  # symmetric weights may have zero points, all of them 0
        if stored[zeros] != StoredTensor("I8", scales.shape):
            return None
        tensors["zeros"] = zeros
    written = Int8Written(Q8 if "zeros" in tensors else W8, num_columns, groups, one, scales.dtype)
    return Composite(name, tensor.shape, tensors, written)


SCHEMES = {"compressed-tensors": CompressedTensors}
