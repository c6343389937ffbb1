"""Conversion of untyped tool arguments to a JSON object, by the tool's schema. The model writes one argument after another.

A parameter that can only be a string is streamed. Any other is converted when it is complete: to JSON if the schema allows its
type, from a Python literal, or else to a string. If the schema states no type, valid JSON is accepted unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from server.text.json_stream import whole_json
from server.text.markers import FedText, Markers, Parse
from server.text.tools.literals import inside, python_to_json
from server.text.tools.schemas import Schema, properties_of, types_of

_TYPES: Final = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_NUMBERS: Final = frozenset(("number", "integer"))


class CallArguments:
    """Writer of one call's arguments as a JSON object. `schema`: JSON schema of the arguments. `emit`: receives pieces of JSON."""

    def __init__(self, schema: Schema, emit: Callable[[str], object]) -> None:
        self._schema = schema
        self._properties = properties_of(schema)
        self._emit = emit
        self._separator = "{"

    def key(self, name: str) -> None:
        self._emit(f"{self._separator}{json.dumps(name, ensure_ascii=False)}: ")
        self._separator = ", "

    def close(self) -> None:
        self._emit("{}" if self._separator == "{" else "}")

    def raw(self, name: str, text: str) -> None:
        """Emit `text`, the complete value of parameter `name`, as JSON."""
        self._emit(typed(text, types_of(self._properties.get(name), self._schema)))

    def value(self, source: FedText, name: str, end: Markers) -> Parse[bool]:
        """Consume the value of parameter `name` up to an `end` marker, and emit it as JSON. Return False if the text ends first."""
        if types_of(self._properties.get(name), self._schema) == {"string"}:
            self._emit('"')
            ended = yield from source.until(end, lambda text: self._emit(inside(text)))
            self._emit('"' if ended else "")
            return bool(ended)
        pieces: list[str] = []
        ended = yield from source.until(end, pieces.append)
        if ended:
            self.raw(name, "".join(pieces))
        return bool(ended)


def typed(text: str, types: frozenset[str]) -> str:
    """Convert the value `text` to JSON of one of `types`, or to a JSON string if none of them matches."""
    string = f'"{inside(text)}"'
    bare = text.strip()
    value = whole_json(bare)
    if not types:
        return value.strip() if value is not None else string
    allowed = types | _NUMBERS if types & _NUMBERS else types  # 3.0 for an integer is still a number
    if value is None or _type(value) not in allowed:
        value = python_to_json(bare)
    if value is not None and _type(value) in allowed:
        return string if _type(value) == "string" else value.strip()
    return string


def _type(value: str) -> str:
    value = value.strip()
    return _TYPES.get(value[0]) or ("integer" if value.lstrip("-").isdigit() else "number")
