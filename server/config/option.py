"""Option: a field of ServerConfig, with its type, bounds and help.

An invalid value is an error that names the option as the user wrote it. A typing error therefore never leads to the default."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from runtime.engine_options import EngineOptions
from server.config.server_config import ServerConfig
from server.config.server_options import GROUPS, ConfigError, flag_of

ENVIRONMENT_PREFIX = "ONELOOP_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def variable_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class Option:
    """Option of the server: a field of ServerConfig with its type. `name`: name of the option. `field`: name of the field."""

    name: str
    field: str
    kind: type  # str, int, float, bool, tuple, or what `parse` makes of text or of what YAML made
    choices: tuple[str, ...]
    default: Any
    metadata: Mapping[str, Any]

    def read(self, value: Any, source: str) -> Any:
        """Return `value`, text or a value from YAML, as the field's type. `source`: option name for errors. Raises ConfigError."""
        if self.kind is tuple:
            items = value if isinstance(value, (list, tuple)) else [value]
            if self.metadata["secret"] and not items:
                raise ConfigError(f"{source} is empty")  # whoever wrote it does not want an open server
            return tuple(self._read_text(item, source) for item in items)
        if self.kind not in (str, int, float, bool):
            return self._read_other(value, source)
        number = self._read_number(value, source) if self.kind in (int, float) else None
        if number is not None:
            return self._in_range(number, source)
        return self._read_bool(value, source) if self.kind is bool else self._read_text(value, source)

    def _read_text(self, value: Any, source: str) -> str:
        if self.metadata["metavar"] == "JSON" and isinstance(value, dict):
            return json.dumps(value, default=str)  # as a program or a YAML file has it
        if self.metadata["secret"] and not isinstance(value, str):
            raise ConfigError(f"{source} is not text; put it in quotes")  # YAML would have changed 0123 or 1_000
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ConfigError(f"{source}: {value!r} is not text")
        text = str(value)
        if self.choices and text not in self.choices:
            raise ConfigError(
                f"{source}: {text!r} is not one of {', '.join(self.choices)}{did_you_mean(text, self.choices)}"
            )
        if not text.strip():
            raise ConfigError(f"{source} is empty")
        return text

    def _read_bool(self, value: Any, source: str) -> bool:
        text = str(value).strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ConfigError(f"{source}: {value!r} is neither true nor false")

    def _read_other(self, value: Any, source: str) -> Any:
        try:
            return value if isinstance(value, self.kind) else self.metadata["parse"](value)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None

    def _read_number(self, value: Any, source: str) -> int | float:
        parse = self.metadata["parse"] or self.kind
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"{source}: {value!r} is not a number")
        try:
            number: int | float = parse(str(value))
        except ValueError as error:
            why = str(error) if self.metadata["parse"] else f"is not {'a whole' if self.kind is int else 'a'} number"
            raise ConfigError(f"{source}: {value!r} {why}") from None
        return number

    def _in_range(self, number: int | float, source: str) -> int | float:
        minimum, maximum = self.metadata["minimum"], self.metadata["maximum"]
        # Written so that NaN, which compares as false with everything, is refused.
        if not ((minimum is None or number >= minimum) and (maximum is None or number <= maximum)):
            bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ConfigError(f"{source}: {number} is out of range: it must be {bounds}")
        return number

    def help(self) -> str:
        default = "" if self.default in (None, ()) else f"; default {_shown(self.default)}"
        return f"{self.metadata['text']} [{variable_of(self.name)}{default}]".replace("%", "%%")

    def brief(self) -> str:
        """Return the first part of the help text, without variable and default."""
        return str(self.metadata["text"]).partition(";")[0].partition(" (default")[0].replace("%", "%%")

    def metavar(self) -> str | None:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return self.metadata["metavar"] or ("N" if self.kind is int else "TEXT")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, int) and value >= 1024**2 and value % 1024**2 == 0:
        return f"{value // 1024**2}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_by_name() -> dict[str, Option]:
    hints = get_type_hints(ServerConfig)
    options = {}
    for spec in dataclasses.fields(ServerConfig):
        hint = hints[spec.name]
        kinds = (
            [kind for kind in get_args(hint) if kind is not type(None)]
            if get_origin(hint) not in (Literal, tuple)
            else [hint]
        )
        kind = kinds[0] if kinds else hint
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        plain = str if choices else (tuple if get_origin(kind) is tuple else kind)
        name = spec.metadata["name"] or spec.name
        options[name] = Option(name, spec.name, plain, choices, spec.default, spec.metadata)
    engines = {spec.name for spec in dataclasses.fields(EngineOptions)}
    in_order = sorted(options.values(), key=lambda opt: (GROUPS.index(opt.metadata["group"]), opt.field in engines))
    return {opt.name: opt for opt in in_order}


class Flag(NamedTuple):
    """Option for shell completion. `takes`: kind of argument, None, "file", "folder" or "word". `values`: all values, if known."""

    names: tuple[str, ...]
    text: str
    values: tuple[str, ...]
    takes: str | None


def flags() -> list[Flag]:
    """Return the flags of all options, in the order of --help."""
    return [
        Flag(
            (flag_of(opt.name), f"--no-{flag_of(opt.name)[2:]}")
            if opt.kind is bool
            else (flag_of(opt.name), *opt.metadata["aliases"]),
            opt.metadata["text"],
            opt.choices,
            None if opt.kind is bool else _TAKES.get(opt.metadata["metavar"], "word"),
        )
        for opt in options_by_name().values()
    ]


_TAKES = {"FILE": "file", "PATH": "file", "MODEL": "file", "FOLDER": "folder"}


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint that names the known word most similar to `word`, or "" if no word is similar. A common `prefix` is not
    compared."""
    without = {each.removeprefix(prefix): each for each in known}
    close = difflib.get_close_matches(word.removeprefix(prefix), without, n=1, cutoff=0.75)
    return f" (did you mean {without[close[0]]}?)" if close else ""
