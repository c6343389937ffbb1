"""The table of what is learned online: its constants are those of the code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import runtime.policy

ROOMS = ("runtime.policy", "runtime.speculate")
ROW = re.compile(r"^\| [^|]*\(`(\w+)\.py`\) \|(.*)\|$", re.MULTILINE)
CONSTANT = re.compile(r"`(_?[A-Z_]+)` ([\d.]+)")


def module(name: str):
    rooms = [
        room
        for room in ROOMS
        if (Path(runtime.policy.__file__).parents[2] / room.replace(".", "/") / f"{name}.py").exists()
    ]
    return import_module(f"{rooms[0]}.{name}")


def test_the_table_names_the_constants_of_the_code():
    rows = ROW.findall((Path(runtime.policy.__file__).parent / "README.md").read_text())
    named = [(name, constant, float(value)) for name, row in rows for constant, value in CONSTANT.findall(row)]
    assert len(named) > 15
    for name, constant, value in named:
        where = import_module("runtime.policy.step_budget") if constant == "_EVERY" else module(name)
        assert getattr(where, constant) == value, (name, constant)
