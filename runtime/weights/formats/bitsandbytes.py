"""Scheme of bitsandbytes as saved by transformers: 8-bit (LLM.int8, Dettmers et al. 2022) and 4-bit (QLoRA, Dettmers et al. 2023).

8-bit: `NAME.weight` [N, K] I8 and `NAME.SCB` [N] F32, the largest absolute value of each row. A weight is code * SCB / 127. The
tensor `weight_format` describes a memory layout and is ignored. bitsandbytes computes columns with outlier activations in 16 bits;
here they are computed like the others.

4-bit: `NAME.weight` [N * K / 2, 1] U8, two codes per byte, the first in the upper half. A code is an index into `weight.quant_map`,
the sixteen values of nf4 or fp4. The value is multiplied by the absmax of its block (`weight.absmax`, F32). Blocks are contiguous,
row by row. With double quantisation, absmax has 8 bits. It is an index into `weight.nested_quant_map`; the value is multiplied by
`weight.nested_absmax`, one for each `nested_blocksize` blocks, and `nested_offset` is added. The sizes and the shape [N, K] are
JSON in `weight.quant_state.bitsandbytes__nf4`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from runtime.weights.dequantize import TABLES, Bytes, Floats
from runtime.weights.formats.codes import FP4, NF4, W8, Coded, as_floats, in_bytes, kept_as, nibbles
from runtime.weights.formats.scheme import Composite, StoredTensor, StoredTensors, UnreadScheme
from runtime.weights.rules import Span, WeightsError

_LARGEST = 127
_STATE = ".quant_state.bitsandbytes__"
_PARTS = {"scales": ".absmax", "nested": ".nested_absmax", "map": ".nested_quant_map"}


@dataclass(frozen=True, slots=True)
class BitsAndBytesInt8(Coded):
    """Int8 weight of bitsandbytes, with one scale per row."""

    def rows(self, role: str, span: Span) -> Span | None:
        return span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        largest = as_floats(raw["scales"].reshape(len(raw["scales"]), -1), "F32")
        return {"weight": raw["weight"], "scales": in_bytes(largest / _LARGEST)}


@dataclass(frozen=True, slots=True)
class FourBitsWritten(Coded):
    """Four-bit weight of bitsandbytes. `block`: number of consecutive weights that share a scale. `nested`: number of scales that
    share a scale, 0 if scales are plain floats. `offset`: added to nested scales."""

    block: int
    nested: int
    offset: float

    @property
    def format(self) -> str:
        kept = kept_as(self.codes, self.num_columns, self.groups)
        return f"{self.codes} in blocks across rows" if self.num_columns % self.block else kept

    def rows(self, role: str, span: Span) -> Span | None:
        start, stop = span.start * self.num_columns, span.stop * self.num_columns
        if role == "weight":
            return Span(start // 2, stop // 2)
        return Span(start // self.block, -(-stop // self.block)) if role == "scales" else None

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        num_rows = span.stop - span.start
        scales = self._scales(raw, span).reshape(num_rows, -1)
        return {"weight": _upper_second(raw["weight"].reshape(num_rows, -1)), "scales": in_bytes(scales)}

    def decode(self, raw: Mapping[str, Bytes], out: Floats, first_row: int) -> None:
        span = Span(first_row, first_row + len(out))
        numbers = TABLES[self.codes][nibbles(_upper_second(raw["weight"].reshape(len(out), -1)))]
        begin = first_row * self.num_columns % self.block
        scales = self._scales(raw, span).repeat(self.block)[begin : begin + out.size]
        np.multiply(numbers, scales.reshape(out.shape), out=out)

    def _scales(self, raw: Mapping[str, Bytes], span: Span) -> Floats:
        stored = raw["scales"].reshape(-1)
        if not self.nested:
            return stored.view(np.float32)
        first = span.start * self.num_columns // self.block
        number = np.arange(first, first + len(stored)) // self.nested
        of_256 = raw["nested"].reshape(-1).view(np.float32)[number]
        scales: Floats = raw["map"].reshape(-1).view(np.float32)[stored] * of_256
        scales += np.float32(self.offset)
        return scales


def _upper_second(packed: Bytes) -> Bytes:
    return (packed >> 4 | packed << 4).astype(np.uint8)


class BitsAndBytes:
    """Scheme of bitsandbytes. Raises UnreadScheme."""

    ignored = (".weight_format", ".quant_map", f"{_STATE}{NF4}", f"{_STATE}{FP4}")

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._four = bool(section.get("load_in_4bit") or section.get("_load_in_4bit"))
        if not self._four and not (section.get("load_in_8bit") or section.get("_load_in_8bit")):
            raise UnreadScheme("in neither eight nor four bits")
        kind = section.get("bnb_4bit_quant_type", NF4)
        if self._four and kind not in (NF4, FP4):
            raise UnreadScheme(f"in {kind}")
        storage = section.get("bnb_4bit_quant_storage", "uint8")
        if self._four and storage != "uint8":
            raise UnreadScheme(f"in bytes that are stored as {storage}")

    def composites(self, stored: StoredTensors) -> Iterator[Composite]:
        yield from _four_bits(stored) if self._four else _eight_bits(stored)


def _eight_bits(stored: StoredTensors) -> Iterator[Composite]:
    for name, (dtype, shape) in stored.items():
        scales_name = f"{name.removesuffix('.weight')}.SCB"
        if dtype != "I8" or len(shape) != 2 or not name.endswith(".weight"):
            continue
        if stored.get(scales_name) == StoredTensor("F32", shape[:1]):
            written = BitsAndBytesInt8(W8, shape[1], 1)
            yield Composite(name, shape, {"weight": name, "scales": scales_name}, written)


def _four_bits(stored: StoredTensors) -> Iterator[Composite]:
    for state_name in [name for name in stored if _STATE in name]:
        name, _, codes = state_name.rpartition(_STATE)
        try:
            yield _of_state(stored, name, codes, json.loads(stored.read(state_name)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{state_name} does not say how {name} is written: {error!r}") from error


def _of_state(stored: StoredTensors, name: str, codes: str, state: Mapping[str, Any]) -> Composite:
    num_rows, num_columns = (int(size) for size in state["shape"])
    block, nested = int(state["blocksize"]), int(state.get("nested_blocksize") or 0)
    if codes not in (NF4, FP4) or num_columns % 2 or block < 1:
        raise ValueError(f"{codes} of {num_columns} columns in blocks of {block}")
    blocks = -(-num_rows * num_columns // block)
    wanted = {
        "": ("U8", num_rows * num_columns // 2),
        ".absmax": ("U8" if nested else "F32", blocks),
        ".quant_map": ("F32", 16),
    }
    if nested:
        wanted |= {".nested_quant_map": ("F32", 256), ".nested_absmax": ("F32", -(-blocks // nested))}
    for end, (dtype, count) in wanted.items():
        tensor = stored[name + end]
        if (tensor.dtype, prod(tensor.shape)) != (dtype, count):
            raise ValueError(f"{name}{end} is {tensor.dtype} {list(tensor.shape)}, not {count} of {dtype}")
    if not np.allclose(np.frombuffer(stored.read(f"{name}.quant_map"), np.float32), TABLES[codes], atol=1e-6):
        raise ValueError(f"{name}.quant_map has other numbers than {codes}")
    tensors = {"weight": name, **{role: name + end for role, end in _PARTS.items() if name + end in stored}}
    groups = max(1, num_columns // block)
    written = FourBitsWritten(codes, num_columns, groups, block, nested, float(state.get("nested_offset") or 0.0))
    return Composite(name, (num_rows, num_columns), tensors, written)


SCHEMES = {"bitsandbytes": BitsAndBytes}
