"""A command that prints what others found: as text for a person, or with --json for a program."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]


def show(argv: Sequence[str], usage: str, find: Callable[[], Found], text: Callable[[Found], str]) -> tuple[int, Found]:
    """The exit code, 0 or 2 for options there are not, and what was found; nothing where nothing was asked."""
    if set(argv) & {"-h", "--help"}:
        print(usage, end="")
        return 0, {}
    if set(argv) - {"--json"}:
        print(usage, end="", file=sys.stderr)
        return 2, {}
    found = find()
    try:
        print(json.dumps(found) if "--json" in argv else text(found), flush=True)
    except BrokenPipeError:  # `| head` is no error, nor is it one to the interpreter, which flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0, found
