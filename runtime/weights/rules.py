"""Weight rules: how a checkpoint's tensors become a decoder's parameters, as tables; and what it means when they do not.

`plan` decides in plain data: which stored rows fill which parameter, with every missing, surplus or wrong-shape tensor
named before a byte is read. No tensors, no files, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.api import LoadProgress

Report = Callable[[LoadProgress], None]
Shape = tuple[int, ...]

_NAMED_AT_MOST = 6  # tensors of one kind of trouble in a message: a wrong file has hundreds

# WeightsError            this model cannot be loaded, for a reason its owner can act on
# ├── FetchError          (weights.builtin) its files could not be found or brought here
# └── UnsupportedModel    (models.spec) its config asks for what is not implemented


class WeightsError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that the decoder needs. `parts`: the rows that each of several stored tensors brings, if it is merged."""

    name: str
    shape: Shape
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters with the dotted segments `ours` are stored under `theirs`, one name or several to be merged by rows."""

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]


def rename(theirs: str, *, into: str) -> Rule:
    """rename("transformer.h", into="model.layers"): dotted segments of a name, wherever they stand in it."""
    return Rule(tuple(into.split(".")), (tuple(theirs.split(".")),))


def merge(theirs: str, *, into: str) -> Rule:
    """merge("q_proj k_proj v_proj", into="qkv_proj"): stored tensors stacked in this order along their rows."""
    return Rule(tuple(into.split(".")), tuple(tuple(name.split(".")) for name in theirs.split()))


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored tensor `name` fills rows `start` to `start + shape[0]` of its parameter. `shape` is the stored one."""

    name: str
    start: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Load:
    parameter: Parameter
    pieces: tuple[Piece, ...]


def stored_as(parameter: Parameter, rules: Iterable[Rule]) -> Load:
    """Where a checkpoint keeps the parameter, by name and shape, if it follows the rules."""
    names = [tuple(parameter.name.split("."))]
    for rule in rules:
        names = [spelling for name in names for spelling in _spellings(name, rule)]
    rows = parameter.parts if len(names) > 1 else parameter.shape[:1]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    pieces = zip(names, starts, rows, strict=True)
    return Load(parameter, tuple(Piece(".".join(n), start, (r, *parameter.shape[1:])) for n, start, r in pieces))


def _spellings(name: tuple[str, ...], rule: Rule) -> Iterator[tuple[str, ...]]:
    width = len(rule.ours)
    for i in range(len(name) - width + 1):
        if name[i : i + width] == rule.ours:
            yield from (name[:i] + theirs + name[i + width :] for theirs in rule.theirs)
            return
    yield name


def plan(
    parameters: Iterable[Parameter], rules: Sequence[Rule], stored: Mapping[str, Shape], *, ignored: Sequence[str] = ()
) -> list[Load]:
    """What to read for each parameter, in their order. `ignored`: endings of stored names that nobody needs.

    Raises WeightsError naming missing, surplus and wrong-shape tensors."""
    loads = [stored_as(parameter, rules) for parameter in parameters]
    wanted = {piece.name: piece.shape for load in loads for piece in load.pieces}
    missing = [name for name in wanted if name not in stored]
    surplus = [name for name in stored if name not in wanted and not name.endswith(tuple(ignored))]
    misshapen = [
        f"{name} is {_text(stored[name])} instead of {_text(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    troubles = (("missing", missing), ("wrong shape", misshapen), ("not part of this architecture", surplus))
    said = [f"{kind}: {_some(names)}" for kind, names in troubles if names]
    if said:
        raise WeightsError("the weights do not fit the config; " + "; ".join(said))
    return loads


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


class TensorSource(Protocol):
    """An open checkpoint: tensors by Hugging Face name."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def stream(self, loads: Sequence[Load], dtype: str, report: Report) -> Iterator[tuple[Parameter, Any]]:
        """Each parameter and its values, in the order of `loads`: a fresh C-contiguous numpy array, float32, float16, or
        uint16 that holds the bits of bfloat16. At most a few arrays wait unread."""
        ...


class Checkpoint(Protocol):
    """Files of a model as `models.load` needs them: the HF-style config, and the tensors once it knows their names."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def open_tensors(
        self, load_format: str, expected: Mapping[str, Shape], seed: int
    ) -> AbstractContextManager[TensorSource]:
        """`expected`: what a checkpoint of this architecture holds; load format "dummy" makes it up from that and `seed`."""
        ...
