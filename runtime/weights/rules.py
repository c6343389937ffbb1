"""Loading rules: tables that map a checkpoint's tensors to a decoder's parameters, and errors for mismatches.

`plan` computes which stored rows fill which parameter. It reports every missing, surplus or wrong-shape tensor before any data is
read. This module reads no files, contains no tensors and does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from runtime.api import LoadProgress

Report = Callable[[LoadProgress], None]
Shape = tuple[int, ...]

_NAMED_AT_MOST = 6  # maximum names per kind of error in a message: a wrong file has hundreds

# WeightsError this model cannot be loaded, for a reason that its owner can fix
# ├── FetchError (weights.builtin) its files could not be found or downloaded
# └── UnsupportedModel (models.spec.model) its config requires something that is not implemented


class WeightsError(Exception):
    pass


# Transforms: forms of stored tensors that differ from the decoder's. `stored_shape`: shape of the whole tensor, merged from
# its shards, for a parameter of `shape`. dtypes.py undoes them.


@dataclass(frozen=True, slots=True)
class Transposed:
    """Transform: the matrix is stored as [in_features, out_features], as in GPT-2's Conv1D."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclass(frozen=True, slots=True)
class UnitOffsetNorm:
    """Transform: the norm weight is stored minus 1. The sum stays float32, because the model computes with that precision."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class InterleavedRope:
    """Transform: the rows of a rotary pair are adjacent, 2i and 2i + 1. In the parameter they are half of the `rotated` dims apart.

    It applies to the rows of the first `num_heads` heads. `by_head`: the stored tensor is [heads, head_size]."""

    num_heads: int
    head_size: int
    rotated: int
    by_head: bool = False

    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0] // self.head_size, self.head_size, *shape[1:]) if self.by_head else shape


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Transform: rows are stored in `num_groups` groups, each with `sizes` rows of each kind. In the parameter all rows of a kind
    are contiguous. Rows after the last group keep their place."""

    num_groups: int
    sizes: tuple[int, ...]

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class InterleavedHalves:
    """Transform: rows of the first and of the second half of the parameter alternate. `as_columns`: the stored tensor is also
    transposed."""

    as_columns: bool = False

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1] if self.as_columns else shape


@dataclass(frozen=True, slots=True)
class SwappedHalves:
    """Transform: the rows of the second half are stored before those of the first half."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class OneRow:
    """Transform: the vector is stored as a matrix with one row."""

    def stored_shape(self, shape: Shape) -> Shape:
        return (1, *shape)


@dataclass(frozen=True, slots=True)
class ConvolutionKernel:
    """Transform: the weight of a convolution over time is stored as [rows, channels, size]. In the parameter, each row has all
    channels of the first time step, then those of the next."""

    size: int

    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0], shape[1] // self.size, self.size)


Transform = (
    Transposed
    | UnitOffsetNorm
    | InterleavedRope
    | GroupedRows
    | InterleavedHalves
    | SwappedHalves
    | OneRow
    | ConvolutionKernel
)


def moves_rows(transform: Transform) -> bool:
    """Return whether the parameter's rows are the stored rows in another order."""
    if isinstance(transform, InterleavedHalves):
        return not transform.as_columns
    return isinstance(transform, SwappedHalves)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Tensor that the decoder needs. `parts`: row counts of the stored tensors that are merged in it, if there are several.

    `stack`: number of equal parameters, numbered in their names, that may be stored as one tensor. `float32`: the parameter is
    float32, regardless of the model's dtype."""

    name: str
    shape: Shape
    parts: tuple[int, ...] = ()
    stack: int = 0
    float32: bool = False


@dataclass(frozen=True, slots=True)
class NameMapping:
    """Rule: in names of parameters, the dotted segments `ours` are called `theirs` in the checkpoint. Several names in `theirs` are
    tensors to be merged by rows."""

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Rule: parameters with a number after the segment `below` are slices of one stored tensor, whose name lacks the number."""

    below: str


@dataclass(frozen=True, slots=True)
class Transformed:
    """Rule: parameters whose names contain the dotted segments `ours` are stored in the form that `transform` describes."""

    ours: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True, slots=True)
class Zeros:
    """Rule: tensors whose names contain the dotted segments `theirs` are zeros and are not stored."""

    theirs: tuple[str, ...]


Rule = NameMapping | Stack | Transformed | Zeros


def rename(theirs: str, *, into: str) -> Rule:
    """Return a rule that maps dotted segments anywhere in a name, such as rename("transformer.h", into="model.layers")."""
    return NameMapping(tuple(into.split(".")), (tuple(theirs.split(".")),))


def merge(theirs: str, *, into: str) -> Rule:
    """Return a rule that concatenates the rows of several stored tensors, such as merge("q_proj k_proj v_proj",
    into="qkv_proj")."""
    return NameMapping(tuple(into.split(".")), tuple(tuple(name.split(".")) for name in theirs.split()))


def stack(below: str) -> Rule:
    """Return a rule for stacked tensors. With stack("experts"), experts.7.down.weight is slice 7 of the stored
    experts.down.weight."""
    return Stack(below)


def transform(ours: str, how: Transform) -> Rule:
    """Return a rule for another stored form, such as transform("c_attn.weight", Transposed()). `ours`: segments of the parameter's
    name."""
    return Transformed(tuple(ours.split(".")), how)


def zeros(theirs: str) -> Rule:
    """Return a rule for tensors that are not stored, such as zeros("k_proj.bias"). Their rows of a merged parameter are zeros."""
    return Zeros(tuple(theirs.split(".")))


class Span(NamedTuple):
    """Range of rows or columns from `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Slice of a parameter that one of several devices has: the ranges `rows`, concatenated, and `columns` of them, None for all.
    `shape`: shape of the slice. If `rows` is empty, the slice is zeros, because another device has the parameter."""

    shape: Shape
    rows: tuple[Span, ...]
    columns: Span | None


@dataclass(frozen=True, slots=True)
class Shard:
    """Stored tensor `name`, or its slice `index`, that fills rows of a parameter from `start` on. `shape`: shape of the stored
    tensor.

    `taken`: rows that are read; `columns`: columns that are used; None means all."""

    name: str
    start: int
    shape: Shape
    index: int | None = None
    taken: Span | None = None
    columns: Span | None = None

    @property
    def whole(self) -> Shape:
        """Shape of the stored tensor, or of one slice of it."""
        return self.shape if self.index is None else self.shape[1:]

    @property
    def rows(self) -> Shape:
        """Shape of the rows and columns that are used."""
        count = self.whole[:1] if self.taken is None else (self.taken.stop - self.taken.start,)
        rest = self.whole[1:] if self.columns is None else (self.columns.stop - self.columns.start,)
        return (*count, *rest)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Plan of reading a parameter from `shards`. `transform`: form in which the merged shards are stored. It is undone first, then
    `cut` is applied. Rows without a shard are zeros."""

    parameter: Parameter
    shards: tuple[Shard, ...]
    transform: Transform | None = None
    cut: Cut | None = None


def stored_as(parameter: Parameter, rules: Iterable[Rule]) -> ReadPlan:
    """Return the plan of reading a parameter. `rules` determine names and shapes of the stored tensors."""
    own_name = tuple(parameter.name.split("."))
    names, index, how = [own_name], None, None
    unwritten: set[tuple[str, ...]] = set()
    for rule in rules:
        match rule:
            case NameMapping():
                names = [stored for name in names for stored in _mapped(name, rule)]
            case Stack(below) if parameter.stack and below in names[0]:
                at = names[0].index(below) + 1
                index = int(names[0][at])
                names = [(*name[:at], *name[at + 1 :]) for name in names]
            case Transformed(ours) if _find(own_name, ours) is not None:
                how = rule.transform
            case Zeros(theirs):
                unwritten.update(name for name in names if _find(name, theirs) is not None)
    shape = parameter.shape if how is None else how.stored_shape(parameter.shape)
    rows = parameter.parts if len(names) > 1 else shape[:1]
    stacked = () if index is None else (parameter.stack,)
    starts = [sum(rows[:i]) for i in range(len(rows))]
    shards = (
        Shard(".".join(name), start, (*stacked, count, *shape[1:]), index)
        for name, start, count in zip(names, starts, rows, strict=True)
        if name not in unwritten
    )
    return ReadPlan(parameter, tuple(shards), how)


def reduced(load: ReadPlan, parameter: Parameter, cut: Cut) -> ReadPlan:
    """Return the plan of reading the slice `cut` of the parameter of `load`. If stored rows are in the parameter's order, only
    needed rows are read."""
    if not cut.rows:
        return ReadPlan(parameter, ())
    if load.transform is not None and not isinstance(load.transform, UnitOffsetNorm):
        return replace(load, parameter=parameter, cut=cut)
    shards, start = [], 0
    for span in cut.rows:
        for shard in load.shards:
            first, last = max(span.start, shard.start), min(span.stop, shard.start + shard.rows[0])
            if first < last:
                taken = Span(first - shard.start, last - shard.start)
                shards.append(replace(shard, start=start + first - span.start, taken=taken, columns=cut.columns))
        start += span.stop - span.start
    return ReadPlan(parameter, tuple(shards), load.transform)


def fitting(
    parameters: Sequence[Parameter], ways: Sequence[Sequence[Rule]], stored: Mapping[str, Shape]
) -> Sequence[Rule]:
    """Return the rules in `ways` for which most parameters are in the checkpoint; of several, the first."""

    def explained(rules: Sequence[Rule]) -> int:
        loads = (stored_as(parameter, rules) for parameter in parameters)
        return sum(all(stored.get(shard.name) == shard.shape for shard in load.shards) for load in loads)

    return ways[0] if len(ways) == 1 else max(ways, key=explained)


def _mapped(name: tuple[str, ...], rule: NameMapping) -> Iterator[tuple[str, ...]]:
    i = _find(name, rule.ours)
    if i is None:
        yield name
    else:
        yield from (name[:i] + theirs + name[i + len(rule.ours) :] for theirs in rule.theirs)


def _find(name: tuple[str, ...], segments: tuple[str, ...]) -> int | None:
    starts = range(len(name) - len(segments) + 1)
    return next((i for i in starts if name[i : i + len(segments)] == segments), None)


def plan(
    parameters: Iterable[Parameter], rules: Sequence[Rule], stored: Mapping[str, Shape], *, ignored: Sequence[str] = (),
    ignored_below: Sequence[str] = (),
) -> list[ReadPlan]:  # fmt: skip
    """Return the plans of reading all parameters, in order. `ignored`, `ignored_below`: suffixes and prefixes of names that are not
    needed. Raises WeightsError with the names of missing, surplus and wrong-shape tensors."""
    loads = [stored_as(parameter, rules) for parameter in parameters]
    wanted = {shard.name: shard.shape for load in loads for shard in load.shards}
    missing = [name for name in wanted if name not in stored]
    accounted = {
        *wanted,
        *(name for name in stored if name.endswith(tuple(ignored)) or name.startswith(tuple(ignored_below))),
    }
    surplus = [name for name in stored if name not in accounted]
    misshapen = [
        f"{name} is {shape_text(stored[name])} instead of {shape_text(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    refuse_misfit(missing, misshapen, surplus)
    return loads


def refuse_misfit(missing: Sequence[str], misshapen: Sequence[str], surplus: Sequence[str]) -> None:
    """Raise WeightsError if any of the three lists contains names of tensors."""
    troubles = (("missing", missing), ("wrong shape", misshapen), ("not part of this architecture", surplus))
    said = [f"{kind}: {_some(names)}" for kind, names in troubles if names]
    if said:
        raise WeightsError("the weights do not fit the config; " + "; ".join(said))


def shape_text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


AS_STORED = "as stored"  # instead of a dtype: quantised, as in the checkpoint


class StoredRows(NamedTuple):
    """Rows of a weight as stored. `format`: ggml's block type, or the name of a format in formats/. `arrays` by role: "weight"
    [rows, bytes per row] uint8, scales and other data."""

    format: str
    arrays: Mapping[str, Any]


class Destination(Protocol):
    """Destination to which a parameter's values are written while they are read, instead of an array on the host."""

    whole: Any  # value that the stream yields after all rows are written
    max_rows: int  # maximum rows per call of `rows`

    def rows(self, start: int, stop: int) -> AbstractContextManager[Any]:
        """Return a context manager that yields an array to fill with rows [start, stop), and stores it at its end. Thread-safe."""
        ...


Destinations = Callable[[Parameter, str], Destination | None]  # called with parameter and dtype; None: read to an array


class TensorSource(Protocol):
    """Open checkpoint: tensors by Hugging Face name. `types`: their dtypes, by ggml's names ("BF16", "Q4_1")."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def types(self) -> Mapping[str, str]: ...

    def stream(
        self, loads: Sequence[ReadPlan], dtype: str, report: Report, storage: Mapping[str, str] = MappingProxyType({}),
        destinations: Destinations | None = None,
    ) -> Generator[tuple[Parameter, Any], None, None]:  # fmt: skip
        """Yield (parameter, values) in the order of `loads`. Values are a new C-contiguous numpy array of float32, float16, or
        uint16 with the bits of bfloat16. Their type is that of `storage` for the parameter, else `dtype`, or float32 if the
        parameter requires it. With AS_STORED they are a list of `StoredRows`, one per shard. A few arrays are read ahead.

        `destinations`: called for each parameter in that order, on the iterating thread; returns where values of plain parameters
        are written."""
        ...


class Checkpoint(Protocol):
    """Files of a model: the config in Hugging Face's format, and the tensors, which are opened when their names are known."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def open_tensors(
        self, load_format: str, expected: Mapping[str, Shape], seed: int
    ) -> AbstractContextManager[TensorSource]:
        """Open the tensors. `expected`: shapes of the tensors of this architecture by name. Load format "dummy" generates these
        from `seed`."""
        ...
