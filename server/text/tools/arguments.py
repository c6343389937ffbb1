"""Tool arguments that a model writes one by one without types, converted to a JSON object by the tool's schema.

A parameter that can only be a string is streamed. Any other is converted at its end: to JSON if its type is allowed, from
Python's spelling, or else to a string. Without a type in the schema, valid JSON is accepted as is."""

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
    """Arguments of one call. `schema`: their JSON schema. `emit`: receives pieces of the JSON object."""

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
        """Emit the value of parameter `name`, complete in `text`."""
        self._emit(typed(text, types_of(self._properties.get(name), self._schema)))

    def value(self, source: FedText, name: str, end: Markers) -> Parse[bool]:
        """Consume and emit a value up to its end marker. Return False if the text ends before the marker."""
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
    """Return the text of a value as JSON of one of these types, or else as a JSON string."""
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
    """Return the type of a valid JSON value: "integer" only for digits without a fraction or exponent."""
    value = value.strip()
    return _TYPES.get(value[0]) or ("integer" if value.lstrip("-").isdigit() else "number")
