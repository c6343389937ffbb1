"""Tuning files: JSON in the form that numbers.py declares, checked entry by entry."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from ops.tuning.numbers import Count, Groups, Tuning

FOLDER = Path(__file__).parent
DEFAULT = "default"


class TuningFile(Groups, frozen=True):
    """Contents of a tuning file.

    `devices`: prefixes of device names as reported by drivers. `multiprocessors`: of the device, None for any number.
    `measured` and `not_measured`: notes for users. `like`: another file, whose groups are the defaults."""

    devices: tuple[str, ...]
    multiprocessors: Count | None
    measured: str
    not_measured: str
    name: str
    like: str | None = None

    def is_for(self, device: str, multiprocessors: int) -> bool:
        """Return whether the file is for a device with this name and number of multiprocessors. A partition of a device has
        fewer."""
        named = any(f"{device} ".startswith(f"{name} ") for name in self.devices)
        return named and multiprocessors == self.multiprocessors

    def tuning(self, multiprocessors: int) -> Tuning:
        groups = {name: getattr(self, name) for name in Groups.__struct_fields__}
        return Tuning(multiprocessors=multiprocessors, **groups)


@cache
def all_files() -> tuple[TuningFile, ...]:
    return tuple(read(path.stem) for path in sorted(FOLDER.glob("*.json")))


@cache
def read(name: str) -> TuningFile:
    """Return the file of this name in the folder. Raises ValueError naming file and entry if it is invalid."""
    return parse(name, _content(name))


def parse(name: str, content: dict[str, Any]) -> TuningFile:
    """Return the tuning file with this content."""
    like = _content(content["like"]) if content.get("like") is not None else {}
    groups = {group: like[group] for group in Groups.__struct_fields__ if group in like}
    try:
        return convert(groups | content | {"name": name}, TuningFile, str_keys=True)
    except ValidationError as error:
        raise ValueError(f"{name}.json: {error}") from error


def _content(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())
