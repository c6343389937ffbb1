"""Scheme: a quantisation format that stores one weight as several tensors of a checkpoint, such as codes, scales and zero
points.

For the loading rules they are one tensor. Reading returns either dequantised values, or rows in the kernels' layout, by
role. A scheme is one file in this folder. It is constructed from the config section that names it (`{}` if there is none),
and describes each weight as a `Written`. A kernel declares the format names that it supports. No other code lists the
schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.weights.dequantize import Bytes, Floats
from runtime.weights.rules import Shape, Span


class UnreadScheme(ValueError):
    """Error: a config requires an unsupported scheme. The message continues "weights quantised with ... are not supported"."""


class StoredTensor(NamedTuple):
    """Tensor of a file. `dtype`: safetensors' name ("U8", "F8_E4M3")."""

    dtype: str
    shape: Shape


class StoredTensors(dict[str, StoredTensor]):
    """Tensors of a checkpoint by name. `read`: returns the bytes of a tensor that describes others. `metadata`: string
    metadata of the files' headers, by name."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], read: Callable[[str], bytes], metadata: Mapping[str, str]
    ) -> None:
        super().__init__(tensors)
        self.read, self.metadata = read, metadata


class Written(Protocol):
    """Layout of one weight in a file. `format`: format of its rows in memory, as named by kernels; without a kernel, it is
    read as floats. `whole`: rows are not contiguous in the file, so a weight is best read at once."""

    @property
    def format(self) -> str: ...
    @property
    def whole(self) -> bool: ...

    def rows(self, role: str, span: Span) -> Span | None:
        """Return the rows (indices of the first dimension) of a role's tensor for these rows of the weight; None: all."""
        ...

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        """Convert data that was read, by role, each [rows, bytes], to rows `span` of the weight in the kernels' layout."""
        ...

    def columns(self, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        """Return these columns of rows in the kernels' layout. Raises WeightsError if they cannot be split there."""
        ...

    def decode(self, raw: Mapping[str, Bytes], out: Floats, first_row: int) -> None:
        """Decode data that was read to the values of rows from `first_row` on, into `out` [rows, ...] float32."""
        ...


@dataclass(frozen=True, slots=True)
class Composite:
    """Weight that is stored as several tensors. `name`: its name for the rules; `shape`: shape of its values; `tensors`:
    names by role: "weight" and "scales", "zeros", "order", or roles from which the scheme computes these."""

    name: str
    shape: Shape
    tensors: Mapping[str, str]
    written: Written


class Scheme(Protocol):
    """Scheme of quantised checkpoints. `ignored`: name suffixes of tensors that are not needed."""

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def composites(self, stored: StoredTensors) -> Iterator[Composite]:
        """Yield the weights of a checkpoint that have this scheme. Raises WeightsError for invalid ones."""
        ...
