"""Tool parser of GLM 4.5 to 4.7: <tool_call>name, then <arg_key>k</arg_key><arg_value>v</arg_value> for each argument,
</tool_call>.

Strings have no quotes; other values are JSON. Only the tool's schema determines a value's type."""

from __future__ import annotations

from server.text.markers import Markers, Parse
from server.text.tools.arguments import CallArguments
from server.text.tools.call_format import CallFormat, Writer
from server.text.tools.schemas import Schema
from server.text.tools.tool_parser import ToolParser

_KEY_END = Markers("</arg_key>")
_VALUE_END = Markers("</arg_value>")


class Glm45(ToolParser):
    starts = Markers("<tool_call>")
    ends = Markers("</tool_call>")
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    call_formats = (CallFormat("<tool_call>NAME\n", "</tool_call>", between="\n"),)

    @classmethod
    def arguments(cls, write: Writer, schema: Schema) -> str:
        def pair(name: str, schema: Schema) -> str:
            if not name.strip() or "</arg_key>" in name:
                raise ValueError(
                    f"rename the parameter {name!r}: this model's calls cannot contain a blank name or </arg_key>"
                )
            key = write.text(f"<arg_key>{name}</arg_key>\n<arg_value>")
            return f"{key} {write.raw(schema, '</arg_value>', '</arg_value>')} {write.text(chr(10))}"

        return write.members(schema, "", pair)

    def _call(self, marker: str) -> Parse[None]:
        yield from self.source.space()
        name = yield from self.source.word()
        if name and (yield from self._pairs(name)):
            self._end()
        else:
            yield from self._fail()

    def _pairs(self, name: str) -> Parse[bool]:
        source = self.source
        arguments = CallArguments(self._parameters.get(name, {}), self._emit_arguments)
        while True:
            yield from source.space()
            if (yield from source.literal("</tool_call>")):
                self._announce(name)
                arguments.close()
                return True
            if not (yield from source.literal("<arg_key>")):
                return False
            self._announce(name)
            pieces: list[str] = []
            key_end = yield from source.until(_KEY_END, pieces.append)
            yield from source.space()
            if not key_end or not (yield from source.literal("<arg_value>")):
                return False
            key = "".join(pieces).strip()
            arguments.key(key)
            if not (yield from arguments.value(source, key, _VALUE_END)):
                return False

    def _announce(self, name: str) -> None:
        if not self._open:
            self._begin(name)
