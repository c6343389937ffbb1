"""Tuning files: JSON of the shape that numbers.py declares, checked entry by entry, so that a mistake is named and not met later.

A file: "devices", the names that it is for, as a driver tells them, with or without words behind; "multiprocessors" that such a
device has; "measured" and "not_measured", for people; then the groups of `Tuning`, or "like" and those that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ops.tuning.numbers import Tuning

FOLDER = Path(__file__).parent
DEFAULT = "default"
_GROUPS = {name: kind for name, kind in get_type_hints(Tuning).items() if name != "multiprocessors"}


@dataclass(frozen=True, slots=True)
class TuningFile:
    """Contents of a tuning file. `groups`: by name of a field of `Tuning`. `multiprocessors`: None if the file is for any
    number of them."""

    name: str
    devices: tuple[str, ...]
    multiprocessors: int | None
    measured: str
    not_measured: str
    groups: Mapping[str, Any]

    def is_for(self, device: str, multiprocessors: int) -> bool:
        """Return whether the file is for a device of this name with this number of multiprocessors. A part of a device has
        fewer."""
        named = any(f"{device} ".startswith(f"{name} ") for name in self.devices)
        return named and multiprocessors == self.multiprocessors

    def tuning(self, multiprocessors: int) -> Tuning:
        return Tuning(multiprocessors, **self.groups)


@cache
def all_files() -> tuple[TuningFile, ...]:
    return tuple(read(path.stem) for path in sorted(FOLDER.glob("*.json")))


@cache
def read(name: str) -> TuningFile:
    """The file of this name in the folder. Raises ValueError, which names file and entry, where it is not as it must be."""
    content: Any = json.loads((FOLDER / f"{name}.json").read_text())
    return parse(name, content)


def parse(name: str, content: dict[str, Any]) -> TuningFile:
    """Return the tuning file with this content."""
    where = f"{name}.json"
    rest = dict(content)
    own: dict[str, Any] = {}
    for key, kind in (
        ("devices", tuple[str, ...]),
        ("multiprocessors", int | None),
        ("measured", str),
        ("not_measured", str),
    ):
        if key not in rest:
            raise ValueError(f"{where}: {key} is missing")
        own[key] = _checked(kind, rest.pop(key), f"{where}: {key}")
    like = rest.pop("like", None)
    groups = dict(read(like).groups) if like is not None else {}
    for key, value in rest.items():
        if key not in _GROUPS:
            raise ValueError(f"{where}: {key} is nothing that is tuned")
        groups[key] = _checked(_GROUPS[key], value, f"{where}: {key}")
    if missing := sorted(_GROUPS.keys() - groups.keys()):
        raise ValueError(f"{where}: {', '.join(missing)} is missing")
    return TuningFile(name, groups=groups, **own)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to type `kind`: a dataclass, tuple[X, ...], dict[int, X], X | None, str, bool, or a number above
    zero."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, where)
    if origin is UnionType:
        return None if value is None else _checked(next(k for k in inner if k is not NoneType), value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(inner[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is dict and isinstance(value, dict) and all(key.isdecimal() for key in value):
        return {int(key): _checked(inner[1], each, f"{where}.{key}") for key, each in value.items()}
    if kind in (str, bool) and type(value) is kind:
        return value
    if kind is int and type(value) is int and value > 0:
        return value
    if kind is float and type(value) in (int, float) and value > 0:
        return float(value)
    raise ValueError(f"{where}: {value!r} is not {getattr(kind, '__name__', None) or kind}")


def _object(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is no object")
    kinds, names = get_type_hints(kind), {field.name for field in fields(kind)}
    if missing := sorted(names - value.keys()):
        raise ValueError(f"{where}: {', '.join(missing)} is missing")
    if unknown := sorted(value.keys() - names):
        raise ValueError(f"{where}: {', '.join(unknown)} is unknown")
    return kind(**{name: _checked(kinds[name], value[name], f"{where}.{name}") for name in names})
