"""Weight rules: how a checkpoint's tensors become a decoder's parameters, as tables; and what it means when they do not.

`plan` decides in plain data: which stored rows fill which parameter, with every missing, surplus or wrong-shape tensor
named before a byte is read. No tensors, no files, no torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from runtime.api import LoadProgress

Report = Callable[[LoadProgress], None]
Shape = tuple[int, ...]

_NAMED_AT_MOST = 6  # tensors of one kind of trouble in a message: a wrong file has hundreds

# WeightsError            this model cannot be loaded, for a reason its owner can act on
# ├── FetchError          (weights.builtin) its files could not be found or brought here
# └── UnsupportedModel    (models.spec.model) its config asks for what is not implemented


class WeightsError(Exception):
    pass


# Transforms: forms in which a checkpoint may store a tensor other than a decoder wants it. `stored_shape`: of the whole tensor,
# merged from its shards, where the parameter has `shape`. How they are undone: dtypes.py.


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
    """The two dims of a rotary pair are neighbours, 2i and 2i + 1, where ours stand half of the `rotated` dims apart.

    So it is in the first `num_heads` of the heads along the rows. `by_head`: the stored tensor is [heads, head_size]."""

    num_heads: int
    head_size: int
    rotated: int
    by_head: bool = False

    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0] // self.head_size, self.head_size, *shape[1:]) if self.by_head else shape


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows by group, each of which has so many (`sizes`) of several kinds, where ours stand by kind. Rows behind the last
    group stay where they are."""

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
    """Rows of the second half stand before those of the first."""

    def stored_shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class OneRow:
    """A vector, stored as a matrix with one row."""

    def stored_shape(self, shape: Shape) -> Shape:
        return (1, *shape)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Weight of a convolution over time [rows, channels, size], where ours has for each row all channels of the first step, then
    those of the next."""

    size: int

    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0], shape[1] // self.size, self.size)


Transform = (
    Transposed | UnitOffsetNorm | InterleavedRope | GroupedRows | InterleavedHalves | SwappedHalves | OneRow | Kernel
)


def moves_rows(transform: Transform) -> bool:
    """Return whether the stored rows are the same rows in another order."""
    if isinstance(transform, InterleavedHalves):
        return not transform.as_columns
    return isinstance(transform, SwappedHalves)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that the decoder needs. `parts`: the rows that each of several stored tensors brings, if it is merged.

    `stack`: how many parameters like this one, numbered in their names, may be stored as one. `float32`: it keeps that
    precision whatever the model's dtype."""

    name: str
    shape: Shape
    parts: tuple[int, ...] = ()
    stack: int = 0
    float32: bool = False


@dataclass(frozen=True, slots=True)
class NameMapping:
    """Parameters with the dotted segments `ours` are stored under `theirs`, one name or several to be merged by rows."""

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Parameters numbered behind the segment `below` are slices of one stored tensor, whose name lacks the number."""

    below: str


@dataclass(frozen=True, slots=True)
class Transformed:
    """Parameters with the dotted segments `ours` are stored in another form."""

    ours: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True, slots=True)
class Zeros:
    """Stored tensors whose names contain the dotted segments `theirs` are not written: all of them is zeros."""

    theirs: tuple[str, ...]


Rule = NameMapping | Stack | Transformed | Zeros


def rename(theirs: str, *, into: str) -> Rule:
    """rename("transformer.h", into="model.layers"): dotted segments of a name, wherever they stand in it."""
    return NameMapping(tuple(into.split(".")), (tuple(theirs.split(".")),))


def merge(theirs: str, *, into: str) -> Rule:
    """merge("q_proj k_proj v_proj", into="qkv_proj"): stored tensors stacked in this order along their rows."""
    return NameMapping(tuple(into.split(".")), tuple(tuple(name.split(".")) for name in theirs.split()))


def stack(below: str) -> Rule:
    """stack("experts"): experts.7.down.weight is slice 7 of experts.down.weight."""
    return Stack(below)


def transform(ours: str, how: Transform) -> Rule:
    """transform("c_attn.weight", Transposed()): `ours` is part of the parameter's name, as it is before any rule."""
    return Transformed(tuple(ours.split(".")), how)


def zeros(theirs: str) -> Rule:
    """zeros("k_proj.bias"): of the parameter that these would be a part of, their rows are zeros."""
    return Zeros(tuple(theirs.split(".")))


class Span(NamedTuple):
    """Indices from `start` up to `stop`, without it."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a parameter with this `shape` on one of several devices: these rows, span after span, and these columns, None
    for all. No rows: zeros, since another device has it."""

    shape: Shape
    rows: tuple[Span, ...]
    columns: Span | None


@dataclass(frozen=True, slots=True)
class Shard:
    """Stored tensor `name`, or slice `index` of it, fills its parameter's rows from `start` on. `shape` is the stored one.

    `taken`, `columns`: the rows that are read of it, and what is kept of each; None for all."""

    name: str
    start: int
    shape: Shape
    index: int | None = None
    taken: Span | None = None
    columns: Span | None = None

    @property
    def whole(self) -> Shape:
        """The shape of what there is to be read."""
        return self.shape if self.index is None else self.shape[1:]

    @property
    def rows(self) -> Shape:
        """The shape of what it fills."""
        count = self.whole[:1] if self.taken is None else (self.taken.stop - self.taken.start,)
        rest = self.whole[1:] if self.columns is None else (self.columns.stop - self.columns.start,)
        return (*count, *rest)


@dataclass(frozen=True, slots=True)
class Load:
    """Plan of reading a parameter. `transform`: decodes what the shards make; `cut` is applied afterwards. Rows that no shard
    fills are zeros."""

    parameter: Parameter
    shards: tuple[Shard, ...]
    transform: Transform | None = None
    cut: Cut | None = None


def stored_as(parameter: Parameter, rules: Iterable[Rule]) -> Load:
    """The tensor in which a checkpoint has the parameter, by name and shape, if it follows the rules."""
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
    return Load(parameter, tuple(shards), how)


def reduced(load: Load, parameter: Parameter, cut: Cut) -> Load:
    """Return what to read for this cut of `load`'s parameter. If rows are stored in their final order, only the needed ones
    are read."""
    if not cut.rows:
        return Load(parameter, ())
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
    return Load(parameter, tuple(shards), load.transform)


def fitting(
    parameters: Sequence[Parameter], ways: Sequence[Sequence[Rule]], stored: Mapping[str, Shape]
) -> Sequence[Rule]:
    """Return the way to write a checkpoint that explains this one best, the first of equals."""

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
) -> list[Load]:  # fmt: skip
    """Return what to read for each parameter, in order. `ignored`: suffixes of unneeded names, `ignored_below`: prefixes.

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


AS_STORED = "as stored"  # stands beside the dtypes: quantised, as the checkpoint has it


class StoredRows(NamedTuple):
    """Rows of a weight as a checkpoint has them. `format`: ggml's name of its blocks, or that of a scheme of formats/; `arrays` by
    role, "weight" [rows, bytes of a row] uint8 and what belongs to it."""

    format: str
    arrays: Mapping[str, Any]


class Destination(Protocol):
    """Destination of a parameter's numbers as they are read, instead of an array on the host."""

    whole: Any  # what the stream gives once they are there
    max_rows: int  # of one piece

    def rows(self, start: int, stop: int) -> AbstractContextManager[Any]:
        """Return a context manager of an array to fill with these rows; its exit stores them. Thread-safe."""
        ...


Destinations = Callable[[Parameter, str], Destination | None]  # by parameter and dtype; None for an array


class TensorSource(Protocol):
    """An open checkpoint: tensors by Hugging Face name. `types`: what their numbers are, by ggml's names ("BF16", "Q4_1")."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def types(self) -> Mapping[str, str]: ...

    def stream(
        self, loads: Sequence[Load], dtype: str, report: Report, storage: Mapping[str, str] = MappingProxyType({}),
        destinations: Destinations | None = None,
    ) -> Generator[tuple[Parameter, Any], None, None]:  # fmt: skip
        """Each parameter and its values, in the order of `loads`: a fresh C-contiguous numpy array, float32, float16, or
        uint16 that holds the bits of bfloat16; as `dtype` says, or `storage` for a parameter named there, or float32 where the
        parameter does. AS_STORED, a list of `StoredRows`, one for each shard. At most a few arrays wait unread.

        `destinations`, called in that order on the thread that iterates: where the numbers go instead, of parameters whose rows
        are read as they are."""
        ...


class Checkpoint(Protocol):
    """Files of a model as `models.load` needs them: the HF-style config, and the tensors once it knows their names."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def open_tensors(
        self, load_format: str, expected: Mapping[str, Shape], seed: int
    ) -> AbstractContextManager[TensorSource]:
        """Open the tensors. `expected`: contents of a checkpoint of this architecture; load format "dummy" draws them with
        `seed`."""
        ...
