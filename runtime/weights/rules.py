"""Weight rules: tables that map a checkpoint's tensors to a decoder's parameters, and errors for mismatches.

`plan` decides in plain data which stored rows fill which parameter, and names every missing, surplus or wrong-shape tensor
before any data is read. No tensors, no files, no torch."""

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
    """Transposed matrix [in_features, out_features], as in GPT-2's Conv1D."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclass(frozen=True, slots=True)
class UnitOffsetNorm:
    """Norm weight stored minus one. The sum stays float32, since the model computes in that precision."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class InterleavedRope:
    """Rotary pairs are stored as adjacent dims, 2i and 2i + 1; in the parameter they are half of the `rotated` dims apart.

    This applies to the first `num_heads` heads along the rows. `by_head`: the stored tensor is [heads, head_size]."""

    num_heads: int
    head_size: int
    rotated: int
    by_head: bool = False

    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0] // self.head_size, self.head_size, *shape[1:]) if self.by_head else shape


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows are stored by group, with `sizes` rows of each kind per group; in the parameter they are sorted by kind. Rows
    after the last group stay in place."""

    num_groups: int
    sizes: tuple[int, ...]

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class InterleavedHalves:
    """Interleaved rows of the first and the second half. `as_columns`: the result is also transposed."""

    as_columns: bool = False

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1] if self.as_columns else shape


@dataclass(frozen=True, slots=True)
class SwappedHalves:
    """Rows of the second half are stored before those of the first."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class OneRow:
    """Vector that is stored as a matrix with one row."""

    def stored_shape(self, shape: Shape) -> Shape:
        return (1, *shape)


@dataclass(frozen=True, slots=True)
class ConvolutionKernel:
    """Weight of a convolution over time, stored as [rows, channels, size]. In the parameter each row has all channels of the
    first step, then those of the next."""

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
    """Return whether the stored rows are the same rows in another order."""
    if isinstance(transform, InterleavedHalves):
        return not transform.as_columns
    return isinstance(transform, SwappedHalves)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Tensor that the decoder needs. `parts`: row counts of the stored tensors that are merged in it, if several.

    `stack`: number of parameters like this one, numbered in their names, that may be stored as one tensor. `float32`: it
    stays float32 regardless of the model's dtype."""

    name: str
    shape: Shape
    parts: tuple[int, ...] = ()
    stack: int = 0
    float32: bool = False


@dataclass(frozen=True, slots=True)
class NameMapping:
    """Rule: parameters with the dotted segments `ours` are stored under `theirs`, one name or several to be merged by rows."""

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Rule: parameters numbered after the segment `below` are slices of one stored tensor, whose name lacks the number."""

    below: str


@dataclass(frozen=True, slots=True)
class Transformed:
    """Rule: parameters with the dotted segments `ours` are stored in another form."""

    ours: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True, slots=True)
class Zeros:
    """Rule: tensors whose names contain the dotted segments `theirs` are all zeros and not stored."""

    theirs: tuple[str, ...]


Rule = NameMapping | Stack | Transformed | Zeros


def rename(theirs: str, *, into: str) -> Rule:
    """Return a rule that renames dotted segments anywhere in a name: rename("transformer.h", into="model.layers")."""
    return NameMapping(tuple(into.split(".")), (tuple(theirs.split(".")),))


def merge(theirs: str, *, into: str) -> Rule:
    """Return a rule that concatenates stored tensors by rows, in order: merge("q_proj k_proj v_proj", into="qkv_proj")."""
    return NameMapping(tuple(into.split(".")), tuple(tuple(name.split(".")) for name in theirs.split()))


def stack(below: str) -> Rule:
    """Return a rule for stacked tensors. With stack("experts"), experts.7.down.weight is slice 7 of experts.down.weight."""
    return Stack(below)


def transform(ours: str, how: Transform) -> Rule:
    """Return a rule such as transform("c_attn.weight", Transposed()). `ours`: part of the parameter's original name."""
    return Transformed(tuple(ours.split(".")), how)


def zeros(theirs: str) -> Rule:
    """Return a rule such as zeros("k_proj.bias"): the rows of a merged parameter that this tensor would fill are zeros."""
    return Zeros(tuple(theirs.split(".")))


class Span(NamedTuple):
    """Range of rows or columns from `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a parameter with this `shape` on one of several devices: the concatenated `rows`, and `columns` of them, None
    for all. No rows: zeros, since another device has the parameter."""

    shape: Shape
    rows: tuple[Span, ...]
    columns: Span | None


@dataclass(frozen=True, slots=True)
class Shard:
    """Stored tensor `name`, or its slice `index`, that fills its parameter's rows from `start` on. `shape`: its stored shape.

    `taken`, `columns`: the rows that are read, and the columns of them that are used; None for all."""

    name: str
    start: int
    shape: Shape
    index: int | None = None
    taken: Span | None = None
    columns: Span | None = None

    @property
    def whole(self) -> Shape:
        """Shape of the stored tensor or slice."""
        return self.shape if self.index is None else self.shape[1:]

    @property
    def rows(self) -> Shape:
        """Shape of the rows and columns that are used."""
        count = self.whole[:1] if self.taken is None else (self.taken.stop - self.taken.start,)
        rest = self.whole[1:] if self.columns is None else (self.columns.stop - self.columns.start,)
        return (*count, *rest)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Plan of reading a parameter. `transform`: how the merged shards are stored; `cut` is applied after undoing it. Rows
    without a shard are zeros."""

    parameter: Parameter
    shards: tuple[Shard, ...]
    transform: Transform | None = None
    cut: Cut | None = None


def stored_as(parameter: Parameter, rules: Iterable[Rule]) -> ReadPlan:
    """Return the load of a parameter, with names and shapes of the stored tensors by `rules`."""
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
    """Return the load of this cut of `load`'s parameter. If rows are stored in their final order, only the needed ones are read."""
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
    """Return the rules out of `ways` that match the checkpoint best, the first of equals."""

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
    """Return the loads of all parameters, in order. `ignored`: suffixes of unneeded names, `ignored_below`: prefixes.

    Raises WeightsError naming missing, surplus and wrong-shape tensors."""
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
    """Rows of a weight as stored. `format`: ggml's name of its blocks, or the name of a scheme in formats/; `arrays`: by
    role, "weight" [rows, bytes per row] uint8 and its scales and other data."""

    format: str
    arrays: Mapping[str, Any]


class Destination(Protocol):
    """Destination for a parameter's values while they are read, instead of an array on the host."""

    whole: Any  # value that the stream yields after all rows are written
    max_rows: int  # maximum rows per call of `rows`

    def rows(self, start: int, stop: int) -> AbstractContextManager[Any]:
        """Return a context manager of an array to fill with these rows; its exit stores them. Thread-safe."""
        ...


Destinations = Callable[[Parameter, str], Destination | None]  # called with parameter and dtype; None: read to an array


class TensorSource(Protocol):
    """An open checkpoint: tensors by Hugging Face name. `types`: dtypes by ggml's names ("BF16", "Q4_1")."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def types(self) -> Mapping[str, str]: ...

    def stream(
        self, loads: Sequence[ReadPlan], dtype: str, report: Report, storage: Mapping[str, str] = MappingProxyType({}),
        destinations: Destinations | None = None,
    ) -> Generator[tuple[Parameter, Any], None, None]:  # fmt: skip
        """Yield each parameter and its values, in the order of `loads`. Values are a new C-contiguous numpy array of float32,
        float16, or uint16 with the bits of bfloat16: by `dtype`, `storage` for a parameter named there, or float32 if the
        parameter requires it. With AS_STORED they are a list of `StoredRows`, one per shard. A few arrays are read ahead.

        `destinations`: called in that order on the iterating thread; returns where values of plain parameters are written."""
        ...


class Checkpoint(Protocol):
    """Files of a model for `models.load`: the HF-style config, and the tensors, opened once their names are known."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def open_tensors(
        self, load_format: str, expected: Mapping[str, Shape], seed: int
    ) -> AbstractContextManager[TensorSource]:
        """Open the tensors. `expected`: shapes of a checkpoint of this architecture; load format "dummy" generates them from
        `seed`."""
        ...
