"""Tool parser of FunctionGemma: <start_function_call>call:name{key:<escape>text<escape>,other:5}<end_function_call>.

<escape> quotes strings at any depth; keys have no quotes. Google's own template omits the quotes of some strings. An unquoted
value that is neither a number nor a constant is therefore converted by the schema. After a call the model writes
<start_function_response>, Google's stop string, which is dropped."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from server.text.markers import Markers, Parse
from server.text.tools.arguments import CallArguments
from server.text.tools.call_format import CallFormat, Writer
from server.text.tools.literals import MAX_DEPTH, inside
from server.text.tools.schemas import Schema, as_schema
from server.text.tools.tool_parser import ToolParser

_ESCAPE = "<escape>"
_ESCAPE_END = Markers(_ESCAPE)
_BARE = re.compile(r"[^,{}\[\]<]*")


class FunctionGemma(ToolParser):
    starts = Markers("<start_function_call>")
    ends = Markers("<end_function_call>")
    inner = (_ESCAPE, "<start_function_response>")
    stops = ("<start_function_response>",)
    call_formats = (CallFormat("<start_function_call>call:NAME{", "}<end_function_call>"),)

    @classmethod
    def arguments(cls, write: Writer, schema: Schema) -> str:
        return write.members(schema, ",", partial(_pair, write, 0))

    def _call(self, marker: str) -> Parse[None]:
        source = self.source
        yield from source.space()
        name = (yield from source.word()) if (yield from source.literal("call:")) else ""
        yield from source.space()
        if not name or not (yield from source.literal("{")):
            yield from self._fail()
            return
        self._begin(name)
        arguments = CallArguments(self._parameters.get(name, {}), self._emit_arguments)
        if not (yield from self._members(arguments, 0)):
            yield from self._fail()
            return
        self._end()
        yield from self._close("<end_function_call>")
        yield from self._close("<start_function_response>")

    def _members(self, arguments: CallArguments, depth: int) -> Parse[bool]:
        source = self.source
        comma = True
        while True:
            yield from source.space()
            if (yield from source.literal("}")):
                arguments.close()
                return True
            quoted = yield from source.literal(_ESCAPE)
            key = yield from source.word()
            if quoted:
                yield from source.literal(_ESCAPE)
            yield from source.space()
            if not comma or not key or not (yield from source.literal(":")):
                return False
            arguments.key(key)
            if not (yield from self._value(arguments, key, depth)):
                return False
            yield from source.space()
            comma = yield from source.literal(",")

    def _value(self, arguments: CallArguments, key: str, depth: int) -> Parse[bool]:
        source = self.source
        char = yield from source.space()
        if (yield from source.literal(_ESCAPE)):
            self._emit_arguments('"')
            ended = yield from source.until(_ESCAPE_END, lambda text: self._emit_arguments(inside(text)))
            self._emit_arguments('"' if ended else "")
            return bool(ended)
        if char and char in "{[":
            source.take(1)
            if depth == MAX_DEPTH:
                return False
            inner = CallArguments({}, self._emit_arguments)
            return (yield from (self._members(inner, depth + 1) if char == "{" else self._items(inner, depth + 1)))
        text = yield from source.run(_BARE)
        if text.strip():
            arguments.raw(key, text.strip())
        return bool(text.strip())

    def _items(self, arguments: CallArguments, depth: int) -> Parse[bool]:
        self._emit_arguments("[")
        separator = ""
        while True:
            yield from self.source.space()
            if (yield from self.source.literal("]")):
                self._emit_arguments("]")
                return True
            self._emit_arguments(separator)
            if not (yield from self._value(arguments, "", depth)):
                return False
            yield from self.source.space()
            separator = ", " if (yield from self.source.literal(",")) else ""
            if not separator and (yield from self.source.peek()) != "]":
                return False


# --- writing ------------------------------------------------------------------------------------------------------

_KEY = re.compile(r"[\w.+\-]+")
_MAX_WRITTEN_DEPTH = 12


def _pair(write: Writer, depth: int, name: str, schema: Schema) -> str:
    if not _KEY.fullmatch(name):
        raise ValueError(f"this model's call format has names without quotes, which {name!r} needs")
    return f"{write.text(name + ':')} {_value(write, depth, schema)}"


def _value(write: Writer, depth: int, schema: Schema) -> str:
    if depth > _MAX_WRITTEN_DEPTH:
        raise ValueError(f"the arguments are nested deeper than {_MAX_WRITTEN_DEPTH}, or refer to themselves")
    return write.either([_kind(write, depth + 1, kind) for kind in write.kinds(schema)])


def _kind(write: Writer, depth: int, schema: Schema) -> str:
    if "enum" in schema:
        return write.either(write.text(_literal(value)) for value in schema["enum"])
    match schema.get("type"):
        case "string":
            return f"{write.text(_ESCAPE)} {write.raw(schema, _ESCAPE, _ESCAPE)}"
        case "array":
            return f"{write.text('[')} {_items(write, depth, schema)} {write.text(']')}"
        case "object":
            return f"{write.text('{')} {write.members(schema, ',', partial(_pair, write, depth))} {write.text('}')}"
        case "integer" | "number" | "boolean" | "null":
            return write.json(schema)
    raise ValueError("this model's call format requires the type of each value in the schema")


def _items(write: Writer, depth: int, schema: Schema) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if "prefixItems" in schema or not isinstance(least, int) or not isinstance(most, int | None):
        raise ValueError("this model's call format supports only items, minItems and maxItems for lists")
    if most == 0:
        return ""
    item = _value(write, depth, as_schema(schema.get("items")))
    more = f"({write.text(',')} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}" if most != 1 else ""
    return f"{item} {more}" if least else f"({item} {more})?"


def _literal(value: Any) -> str:
    if not isinstance(value, str | int | float | None):
        raise ValueError("this model's call format does not support an enum of objects or lists")
    return f"{_ESCAPE}{value}{_ESCAPE}" if isinstance(value, str) else json.dumps(value)
