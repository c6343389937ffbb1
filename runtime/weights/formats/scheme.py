"""Interface of schemes. A scheme is a quantised format in which one weight is several tensors of a checkpoint, such as codes,
scales and zero points.

The loading rules treat such a weight as one tensor. Reading it returns either dequantised values, or rows in the kernels' layout,
by role. Each file in this folder is one scheme. A scheme is created from the config section that names it (`{}` if there is none),
and describes each weight as a `Written`. A kernel lists the formats that it supports. No other code lists the schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.weights.dequantize import Bytes, Floats
from runtime.weights.rules import Shape, Span


class UnreadScheme(ValueError):
    """Error: a config requires an unsupported scheme. Its text follows the words "weights quantised with ... are not supported"."""


class StoredTensor(NamedTuple):
    """Description of a tensor in a file. `dtype`: name in safetensors ("U8", "F8_E4M3")."""

    dtype: str
    shape: Shape


class StoredTensors(dict[str, StoredTensor]):
    """Tensors of a checkpoint by name. `read`: function that returns the bytes of a tensor, for tensors that describe others.
    `metadata`: string metadata in the files' headers, by name."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], read: Callable[[str], bytes], metadata: Mapping[str, str]
    ) -> None:
        super().__init__(tensors)
        self.read, self.metadata = read, metadata


class Written(Protocol):
    """Layout of one weight in a file. `format`: format of its rows in memory, by the name that kernels use. If no kernel supports
    the format, the weight is read as floats. `whole`: rows are not contiguous in the file, so the weight should be read at once."""

    @property
    def format(self) -> str: ...
    @property
    def whole(self) -> bool: ...

    def rows(self, role: str, span: Span) -> Span | None:
        """Return the rows (indices of the first dimension) of the tensor `role` that are needed for rows `span` of the weight; None
        means all."""
        ...

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        """Convert data that was read to rows `span` of the weight in the kernels' layout, by role. raw: by role, [rows, bytes]
        each."""
        ...

    def columns(self, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        """Return columns `span` of rows in the kernels' layout. Raises WeightsError if the layout cannot be split there."""
        ...

    def decode(self, raw: Mapping[str, Bytes], out: Floats, first_row: int) -> None:
        """Dequantise data that was read into `out` [rows, ...] float32. `first_row`: first of these rows in the weight."""
        ...


@dataclass(frozen=True, slots=True)
class Composite:
    """Weight that is stored as several tensors. `name`: its name for the loading rules. `shape`: shape of its values. `tensors`:
    names of the tensors by role: "weight", "scales", "zeros", "order", or roles from which the scheme computes these."""

    name: str
    shape: Shape
    tensors: Mapping[str, str]
    written: Written


class Scheme(Protocol):
    """Format of quantised checkpoints. `ignored`: name suffixes of tensors that are not needed."""

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def composites(self, stored: StoredTensors) -> Iterator[Composite]:
        """Yield the weights of a checkpoint that are stored in this format. Raises WeightsError for invalid ones."""
        ...
