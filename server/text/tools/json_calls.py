"""Base of tool parsers for calls written as JSON objects: {"name": …, "arguments": {…}}, alone or in a list, keys in any order.

Arguments are streamed once the name is known. Arguments that precede the name are held back."""

from __future__ import annotations

from typing import ClassVar

from server.text.json_stream import json_string, json_value
from server.text.markers import Parse
from server.text.tools.tool_parser import ToolParser, ignore

_ARGUMENTS = ("arguments", "parameters")


class JsonCalls(ToolParser):
    """Base class of parsers for JSON objects, or lists of objects, as calls. Subclasses parse the text around the JSON."""

    closes: ClassVar[tuple[str, ...]] = ()  # what may follow the last call that a marker begins
    any_keys = True  # an object may hold more than a call does
    any_name = True  # a call may name what is no tool of the request

    def _call(self, marker: str) -> Parse[None]:
        if (yield from self._objects(in_list=marker.endswith("["))):
            yield from self._close(*self.closes)

    def _objects(self, *, in_list: bool = False) -> Parse[bool]:
        """Parse one call or a list of calls. Return False if an object was not a call; its text has then been emitted.

        `in_list`: the opening bracket was already consumed."""
        if not in_list and (yield from self.source.space()) != "[":
            return (yield from self._object())
        if not in_list:
            self.source.take(1)
        while (yield from self._object()):
            yield from self.source.space()
            if (yield from self.source.literal("]")):
                return True
            if not (yield from self.source.literal(",")):
                break
        else:
            return False
        yield from self._fail()
        return False

    def _object(self) -> Parse[bool]:
        if (yield from _CallObject(self).read()):
            self._end()
            return True
        yield from self._fail()
        return False


class _CallObject:
    """Parser state of one JSON object that may be a call."""

    def __init__(self, calls: JsonCalls) -> None:
        self._calls = calls
        self._name: str | None = None
        self._id: str | None = None
        self._waiting: list[str] = []  # arguments that came before the name
        self._has_arguments = False

    def read(self) -> Parse[bool]:
        source = self._calls.source
        yield from source.space()
        if not (yield from source.literal("{")):
            return False
        while (yield from self._member()):
            yield from source.space()
            if (yield from source.literal("}")):
                return self._whole()
            if not (yield from source.literal(",")):
                return False
        return False

    def _member(self) -> Parse[bool]:
        source = self._calls.source
        key = yield from json_string(source)
        yield from source.space()
        if key is None or not (yield from source.literal(":")):
            return False
        if key == "name" and self._name is None:
            self._name = yield from json_string(source)
            return self._named()
        if key in _ARGUMENTS and not self._has_arguments:
            return (yield from self._arguments())
        if key == "id" and (yield from source.space()) == '"':
            self._id = yield from json_string(source)
            return self._id is not None
        if not self._calls.any_keys and key not in ("type", "id"):
            return False
        return (yield from json_value(source, ignore))

    def _arguments(self) -> Parse[bool]:
        self._has_arguments = True
        if self._name is None:
            return (yield from self._calls._arguments(_nothing, self._waiting.append))
        return (yield from self._calls._arguments_of(self._name, self._id))

    def _named(self) -> bool:
        if self._name is None or not (self._calls.any_name or self._calls._is_tool(self._name)):
            return False
        if self._has_arguments:
            self._announce()
        return True

    def _whole(self) -> bool:
        if self._name is None:
            return False
        if not self._has_arguments:
            self._waiting.append("{}")
            self._announce()
        return True

    def _announce(self) -> None:
        assert self._name is not None, "called once there is a name"
        self._calls._begin(self._name, self._id)
        self._calls._emit_arguments("".join(self._waiting))


def _nothing() -> None:
    pass
