"""Commands `oneloop pull`, `list`, `show` and `rm`: manage the models on this disk, by name.

The entry point provides the implementation of `Library`."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from server.config.command_line import CommandParser
from server.config.server_options import ConfigError
from server.models.library import Library
from server.process.terminal import StartupDisplay, size_of

INTERRUPTED = 130
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60


def pull(argv: Sequence[str], library: Library) -> int:
    """Download models and check their hashes. Return the exit code. Raises ConfigError."""
    parser = _parser(
        "pull", "NAME… [--revision REVISION]", "Download models, continue interrupted downloads, and check hashes."
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="name that `oneloop models` lists, or hub id")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of a hub id")
    given = parser.read(argv)
    return max(_pull(name, given.get("revision"), library) for name in given["names"])


def _pull(name: str, revision: str | None, library: Library) -> int:
    display, cancel = StartupDisplay(sys.stderr), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        pulling = thread.submit(library.pull, name, revision, display.report, cancel)
        try:
            path = pulling.result()
        except KeyboardInterrupt:
            cancel.set()
            display.finish()
            print(f"oneloop: stopped; oneloop pull {name} continues", file=sys.stderr)
            return INTERRUPTED
        except ValueError as error:
            display.finish()
            print(f"oneloop: {error}", file=sys.stderr)
            return 1
    display.finish()
    print(f"{name} is in {path}")
    return 0


def list_kept(argv: Sequence[str], library: Library) -> int:
    """List the models on this disk. Return the exit code. Raises ConfigError."""
    parser = _parser("list", "[--json]", "List the models on this disk.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given, models = parser.read(argv), library.kept()
    if given.get("json"):
        print(json.dumps([*models]))
        return 0
    width = max((len(model["name"]) for model in models), default=0) + 2
    for model in models:
        state = "" if model["whole"] else f"  incomplete: oneloop pull {model['name']} continues"
        print(f"{model['name']:<{width}}{size_of(model['bytes']):>10}  {ago(time.time() - model['modified'])}{state}")
    if not models:
        print("no models yet: oneloop pull NAME downloads one, oneloop models lists names", file=sys.stderr)
    return 0


def ago(seconds: float) -> str:
    """Return a duration as text, in the largest whole unit."""
    for unit_s, unit in ((DAY_S, "day"), (HOUR_S, "hour"), (MINUTE_S, "minute")):
        if seconds >= unit_s:
            number = int(seconds // unit_s)
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"


def show(argv: Sequence[str], library: Library) -> int:
    """Print a description of a model. Return the exit code. Raises ConfigError."""
    parser = _parser(
        "show", "NAME [--json]", "Show the size, licence and formats of a model, and its files on this disk."
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.read(argv)
    try:
        found = library.describe(given["name"])
    except ValueError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 1
    if given.get("json"):
        print(json.dumps(found))
        return 0
    rows: dict[str, str | None] = {
        "name": found["name"],
        "task": found.get("task"),
        "source": found.get("source"),
        "license": found.get("license"),
        "parameters": f"{found['parameters']:,}" if "parameters" in found else None,
        "formats": ", ".join(f"{kind} ({size_of(size)})" for kind, size in found.get("formats", {}).items()) or None,
        "architecture": found.get("architecture"),
        "size": size_of(found["bytes"]) if found["here"] else None,
        "here": found["path"] if found["here"] else f"no: oneloop pull {found['name']}",
    }
    print("\n".join(f"  {title:<14}{text}" for title, text in rows.items() if text is not None))
    return 0


def remove(argv: Sequence[str], library: Library, read: Callable[[str], str] = input) -> int:
    """Delete models from this disk after confirmation. Return the exit code. Raises ConfigError."""
    parser = _parser("rm", "NAME… [--yes]", "Delete models from this disk.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("-y", "--yes", action="store_true", help="delete without confirmation")
    given = parser.read(argv)
    if not given.get("yes") and not sys.stdin.isatty():
        raise ConfigError("rm requires a confirmation, and standard input is no terminal: add --yes")
    for name in given["names"]:
        try:
            if not given.get("yes"):
                found = library.describe(name)
                if "path" in found and not _agrees(
                    read, f"delete {name} ({size_of(found['bytes'])}, {found['path']})? [y/N] "
                ):
                    return 1
            gone = library.remove(name)
        except ValueError as error:
            print(f"oneloop: {error}", file=sys.stderr)
            return 1
        print(f"deleted {gone['name']}, {size_of(gone['bytes'])}")
    return 0


def _agrees(read: Callable[[str], str], question: str) -> bool:
    try:
        return read(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False


def _parser(command: str, words: str, description: str) -> CommandParser:
    return CommandParser(
        prog=f"oneloop {command}", usage=f"oneloop {command} {words}", description=description, allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
