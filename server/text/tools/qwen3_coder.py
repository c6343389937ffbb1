"""Tool parser of Qwen3-Coder: <tool_call><function=name><parameter=k>v</parameter></function></tool_call>, one tag per line.

Values have no types and are on separate lines: one line break on each side belongs to the tags. Models often omit the outer tag,
so <function= also starts a call."""

from __future__ import annotations

from server.text.markers import Markers, Parse
from server.text.tools.arguments import CallArguments
from server.text.tools.call_format import CallFormat, Writer
from server.text.tools.schemas import Schema
from server.text.tools.tool_parser import ToolParser

_TAG_END = Markers(">", "<")
_END = "\n</parameter>"
_VALUE_END = Markers("\n</parameter>", "</parameter>")


class Qwen3Coder(ToolParser):
    starts = Markers("<tool_call>", "<function=")
    ends = Markers("</tool_call>", "</function>")
    call_formats = (CallFormat("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n"),)

    @classmethod
    def arguments(cls, write: Writer, schema: Schema) -> str:
        def parameter(name: str, schema: Schema) -> str:
            if not name.strip() or set(name) & set("<>\n"):
                raise ValueError(
                    f"rename the parameter {name!r}: this model's calls cannot contain a blank name, <, > or line breaks"
                )
            return f"{write.text(f'<parameter={name}>' + chr(10))} {write.raw(schema, _END, '</parameter>')} {write.text(chr(10))}"

        return write.members(schema, "", parameter)

    def _call(self, marker: str) -> Parse[None]:
        yield from self.source.space()
        if marker != "<function=" and not (yield from self.source.literal("<function=")):
            yield from self._fail()
        elif (yield from self._function()):
            self._end()
            yield from self._close("</tool_call>")
        else:
            yield from self._fail()

    def _function(self) -> Parse[bool]:
        source = self.source
        name = yield from source.word()
        if not name or not (yield from source.literal(">")):
            return False
        arguments = CallArguments(self._parameters.get(name, {}), self._emit_arguments)
        self._begin(name)
        while True:
            yield from source.space()
            if (yield from source.literal("</function>")):
                arguments.close()
                return True
            if not (yield from source.literal("<parameter=")):
                return False
            pieces: list[str] = []
            tag_end = yield from source.until(_TAG_END, pieces.append)
            key = "".join(pieces).strip()
            if tag_end != ">" or not key:
                return False
            yield from source.literal("\n")
            arguments.key(key)
            if not (yield from arguments.value(source, key, _VALUE_END)):
                return False
