"""Tool parser of Kimi K2: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>.

The text before the arguments is the call's id. Its number counts all calls of the conversation. The template writes ids
unchanged into later prompts. The model's id is therefore kept: a generated id would differ from the training data."""

from __future__ import annotations

from server.text.markers import Markers, Parse
from server.text.tools.call_format import CallFormat
from server.text.tools.section import Section


class KimiK2(Section):
    section_begin = "<|tool_calls_section_begin|>"
    section_end = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"
    starts = Markers(section_begin, call_begin)
    ends = Markers(call_end, section_end)
    inner = ("<|tool_call_argument_begin|>",)
    call_formats = (
        CallFormat(
            f"{call_begin}functions.NAME:NUMBER<|tool_call_argument_begin|>",
            call_end,
            before=section_begin,
            after=section_end,
        ),
    )

    def _one(self) -> Parse[bool]:
        yield from self.source.space()
        name = yield from self.source.word()
        number = ""
        if (yield from self.source.literal(":")):
            number = ":" + (yield from self.source.word())
        yield from self.source.space()
        if not name or not (yield from self.source.literal("<|tool_call_argument_begin|>")):
            return False
        return (yield from self._rest(name.removeprefix("functions."), name + number))
