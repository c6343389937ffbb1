"""compressed-tensors, by its formats float-quantized, int-quantized, naive-quantized, pack-quantized, nvfp4-pack-quantized,
mxfp4-pack-quantized and mxfp8-quantized.

FP8 as fp8.py reads it, NVFP4 as nvfp4.py and MXFP4 as mxfp4.py do. `NAME.weight` [N, K] I8 with `weight_scale` of one number, one
a row or [N, groups]. Packed: `weight_packed` [N, K / codes of a word] I32, `weight_scale` [N, groups], `weight_zero_point`
[N / codes of a word, groups] I32 where there are any, `weight_g_idx` [K] I32 where columns stand in an order of their own. Which
layers are quantised the tensors tell; in how many bits those are that are packed, the group of the config whose targets name the
layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats import mxfp4, nvfp4
from runtime.weights.formats.codes import W4, W8, Coded, as_floats, in_bytes, in_groups
from runtime.weights.formats.fp8 import ACTIVATIONS, Fp8, mxfp8
from runtime.weights.formats.int32_codes import along_columns, along_rows, as_weight
from runtime.weights.formats.scheme import Composite, StoredTensor, UnreadScheme
from runtime.weights.rules import Span

_FORMATS = frozenset({
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision",
})  # fmt: skip
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Int8Written(Coded):
    """`one`: there is a single scale. `dtype`: of scales."""

    one: bool
    dtype: str

    def rows(self, role: str, span: Span) -> Span | None:
        return None if role == "scales" and self.one else span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        scales = as_floats(raw["scales"].reshape(len(raw["scales"]), -1), self.dtype)
        return {
            "weight": raw["weight"],
            "scales": in_bytes(scales.repeat(len(raw["weight"]), 0) if self.one else scales),
        }


@dataclass(frozen=True, slots=True)
class PackedWritten(Coded):
    """`dtype`: of scales."""

    dtype: str

    def rows(self, role: str, span: Span) -> Span | None:
        return span if role in ("weight", "scales") else None

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        bits = 4 if self.codes == W4 else 8
        codes = along_rows(raw["weight"], bits)
        found: dict[str, Bytes] = {"scales": in_bytes(as_floats(raw["scales"], self.dtype))}
        if "zeros" in raw:
            found["zeros"] = np.ascontiguousarray(along_columns(raw["zeros"], bits).T[slice(*span)])
        order = None if "order" not in raw else in_groups(raw["order"].view(np.int32).reshape(-1), self.groups)
        if order is not None:
            codes = codes[:, order]
            found["order"] = in_bytes(order[None])
        return found | {"weight": as_weight(codes, self.codes)}


class CompressedTensors:
    """See `Scheme`. Raises UnreadScheme."""

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
        blocks = [args["block_structure"] for args in weights if isinstance(args.get("block_structure"), list)]
        self._fp8 = Fp8({"weight_block_size": blocks[0]} if blocks else {})

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
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
        if len(scales.shape) != 2 or scales.shape[0] != num_rows or num_columns % scales.shape[1]:
            return None
        tensors = {"weight": name, "scales": f"{base}.weight_scale"}
        for role, end in (("zeros", ".weight_zero_point"), ("order", ".weight_g_idx")):
            if base + end in stored:
                tensors[role] = base + end
        codes = W4 if bits == 4 else W8
        if "zeros" in tensors and (codes == W8 or stored[tensors["zeros"]].dtype != "I32"):
            return None  # what is left over will be named
        written = PackedWritten(codes, num_columns, scales.shape[1], scales.dtype)
        return Composite(f"{base}.weight", (num_rows, num_columns), tensors, written)

    def _bits_of(self, layer: str) -> int | None:
        """Of the group that names the layer, else of the one that names all linear layers, or of the only one."""
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


def _int8(name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> Composite | None:
    scales = stored.get(f"{name}_scale")
    if tensor.dtype != "I8" or len(tensor.shape) != 2 or scales is None or scales.dtype not in _FLOATS:
        return None
    num_rows, num_columns = tensor.shape
    one = prod(scales.shape) == 1 and num_rows > 1
    groups = 1 if one or len(scales.shape) < 2 else scales.shape[1]
    if not one and scales.shape not in ((num_rows,), (num_rows, groups)):
        return None
    written = Int8Written(W8, num_columns, groups, one, scales.dtype)
    return Composite(name, tensor.shape, {"weight": name, "scales": f"{name}_scale"}, written)


SCHEMES = {"compressed-tensors": CompressedTensors}
