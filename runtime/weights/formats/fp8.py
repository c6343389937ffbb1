"""Scheme of FP8 weights (E4M3) with scales, as published by DeepSeek, Qwen, Llama and ModelOpt.

`NAME.weight` [N, K] F8_E4M3 with `weight_scale_inv` or `weight_scale`; both multiply. There is a scale per tensor, per row, or per
block of the config's `weight_block_size` (128 by 128). A scale is a float or a power of two (E8M0). MXFP8 of compressed-tensors
stores E8M0 bytes as U8, one for 32 columns of a row. The activation scale (`input_scale`) is ignored: kernels quantise each token
by its own largest value, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.formats.codes import E8M0, FP8, Coded, as_floats, in_bytes
from runtime.weights.formats.scheme import Composite, StoredTensor, UnreadScheme
from runtime.weights.rules import Shape, Span

ACTIVATIONS = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".q_scale", ".prob_scale", ".weight_zero_point",
)  # fmt: skip
_SCALES = ("_scale_inv", "_scale")  # suffixes after the weight's name
_FLOATS = ("F32", "BF16", "F16", E8M0)


@dataclass(frozen=True, slots=True)
class Fp8Written(Coded):
    """FP8 weight. `block`: number of rows (None for all rows) and columns that share a scale. `dtype`: dtype of scales."""

    block: tuple[int | None, int]
    dtype: str

    def rows(self, role: str, span: Span) -> Span | None:
        rows = self.block[0]
        if role == "weight":
            return span
        return None if rows is None else Span(span.start // rows, -(-span.stop // rows))

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        rows, columns = self.block
        scales = as_floats(raw["scales"].reshape(len(raw["scales"]), -1), self.dtype)
        number = np.arange(span.start, span.stop)
        scales = scales[number * 0 if rows is None else number // rows - span.start // rows]
        if self.groups > 1:  # a block at the edge may be narrower: groups use a size that divides all
            group = self.num_columns // self.groups
            scales = scales[:, np.arange(self.groups) * group // columns]
        return {"weight": raw["weight"], "scales": in_bytes(scales)}


class Fp8:
    """Scheme of FP8 weights with scales."""

    ignored = ACTIVATIONS

    def __init__(self, section: Mapping[str, Any]) -> None:
        rows, columns = section.get("weight_block_size") or (128, 128)
        self._block = int(rows), int(columns)

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        for name, (dtype, shape) in stored.items():
            if dtype != "F8_E4M3" or len(shape) != 2:
                continue
            for scales_name in (name + end for end in _SCALES if name + end in stored):
                written = fp8_written(shape, stored[scales_name], self._block)
                if written is not None:
                    yield Composite(name, shape, {"weight": name, "scales": scales_name}, written)
                    break


def fp8_written(shape: Shape, scales: StoredTensor, block: tuple[int, int]) -> Fp8Written | None:
    """Return the layout of an FP8 weight, from the shape of its scales; None if their shape does not fit the weight."""
    num_rows, num_columns = shape
    if scales.dtype not in _FLOATS:
        return None
    if prod(scales.shape) == 1:
        return Fp8Written(FP8, num_columns, 1, (None, num_columns), scales.dtype)
    if scales.shape in ((num_rows,), (num_rows, 1)):
        return Fp8Written(FP8, num_columns, 1, (1, num_columns), scales.dtype)
    if scales.shape != (-(-num_rows // block[0]), -(-num_columns // block[1])):
        return None
    groups = num_columns // gcd(num_columns, block[1]) if num_columns > block[1] else 1
    return Fp8Written(FP8, num_columns, groups, block, scales.dtype)


def mxfp8(stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
    for name, (dtype, shape) in stored.items():
        scales = stored.get(f"{name}_scale")
        if dtype == "F8_E4M3" and len(shape) == 2 and scales is not None and scales.dtype == "U8":
            written = fp8_written(shape, StoredTensor(E8M0, scales.shape), (1, 32))
            if written is not None:
                yield Composite(name, shape, {"weight": name, "scales": f"{name}_scale"}, written)


def fine_grained(section: Mapping[str, Any]) -> Fp8:
    """Return the scheme of a fine-grained FP8 config. Raises UnreadScheme if its format is not E4M3."""
    if section.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnreadScheme(f"in {section['fmt']}")
    return Fp8(section)


SCHEMES = {"fp8": fine_grained, "fbgemm_fp8": Fp8}
