"""Tool parser of Python calls: the answer is [name(key="value"), …] (Llama 3.2 and 4), or has <function_calls>, one call per line
(OLMo 3).

No marker distinguishes a bare list of calls from other text in brackets. Text is a list of calls if it is at the start or after
<|python_start|>, and its first call names a tool of the request."""

from __future__ import annotations

import re

from server.text.markers import Markers, Parse
from server.text.tools.arguments import CallArguments
from server.text.tools.call_format import CallFormat, Writer
from server.text.tools.literals import python_value
from server.text.tools.schemas import Schema
from server.text.tools.tool_parser import ToolParser

_WORD = re.compile(r"\w+")
_END_TAGS = {"<function_calls>": "</function_calls>", "<|python_start|>": "<|python_end|>"}


class Pythonic(ToolParser):
    starts = Markers(*_END_TAGS)
    ends = Markers(*_END_TAGS.values())
    call_formats = (CallFormat("NAME(", ")", before="[", between=", ", after="]"),)
    bare = "["

    @classmethod
    def arguments(cls, write: Writer, schema: Schema) -> str:
        """Return the grammar expression of a call's arguments. Values are JSON; the parser also accepts true, false and null."""

        def argument(name: str, schema: Schema) -> str:
            if not _WORD.fullmatch(name):
                raise ValueError(f"this model's calls are Python, in which no argument can have the name {name!r}")
            return f"{write.text(name + '=')} {write.json(schema)}"

        return write.members(schema, ", ", argument)

    def _call(self, marker: str) -> Parse[None]:
        yield from self.source.space()
        bracket = yield from self.source.literal("[")
        while (yield from self._one(must_be_known=marker != "<function_calls>")):
            self._end()
            yield from self.source.space()
            yield from self.source.literal(",")
            yield from self.source.space()
            if bracket and (yield from self.source.literal("]")):
                break
            if not bracket and (yield from self.source.literal(_END_TAGS[marker])):
                return
        else:
            yield from self._fail()
            return
        if marker:
            yield from self._close(_END_TAGS[marker])

    def _one(self, *, must_be_known: bool) -> Parse[bool]:
        source = self.source
        yield from source.space()
        name = yield from source.word()
        if not name or (must_be_known and not self._is_tool(name)):
            return False
        yield from source.space()
        if not (yield from source.literal("(")):
            return False
        self._begin(name)
        arguments = CallArguments({}, self._emit_arguments)
        comma = True
        while True:
            yield from source.space()
            if (yield from source.literal(")")):
                arguments.close()
                return True
            key = yield from source.word()
            yield from source.space()
            if not comma or not key or not (yield from source.literal("=")):
                return False
            arguments.key(key)
            if not (yield from python_value(source, self._emit_arguments)):
                return False
            yield from source.space()
            comma = yield from source.literal(",")
