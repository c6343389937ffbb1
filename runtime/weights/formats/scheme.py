"""Scheme: a way of quantising that keeps one weight as several tensors of a checkpoint: its numbers, and what belongs to them.

To the rules, which know names and shapes, they are one tensor. Reading gives either the numbers, or rows as kernels take them, by
role. A scheme is one file here, whose SCHEME makes it of the section of a config that names it (`{}` where none does), and a
kernel that says it takes the format; nothing else asks which schemes there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.weights.dequantize import Bytes, Floats
from runtime.weights.rules import Shape, Span


class StoredTensor(NamedTuple):
    """`dtype` as safetensors call it ("U8", "F8_E4M3")."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Composite:
    """Several stored tensors that are one weight. `name`: by which the rules find it, that of one of them; `shape`: of its numbers;
    `tensors`: names by role, "weight" and "scales", "zeros", "order"."""

    name: str
    shape: Shape
    tensors: Mapping[str, str]


class Scheme(Protocol):
    """`quant_method`: as a config calls it. `format`: of what it keeps, as `StoredRows` and kernels call that."""

    @property
    def quant_method(self) -> str: ...
    @property
    def format(self) -> str: ...

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        """The weights among a checkpoint's tensors that are kept so."""
        ...

    def rows(self, role: str, span: Span) -> Span:
        """Which rows (indices of the first dimension) of a role's tensor belong to these of the weight."""
        ...

    def stored_form(self, raw: Mapping[str, Bytes]) -> dict[str, Bytes]:
        """Rows as they are stored, by role, each [rows, bytes of one] -> rows as kernels take them, likewise."""
        ...

    def decode(self, raw: Mapping[str, Bytes], out: Floats, first_row: int) -> None:
        """Rows as they are stored, from `first_row` of the weight on -> their numbers, into `out` [rows, ...] float32."""
        ...
