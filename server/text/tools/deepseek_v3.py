"""Tool parser of DeepSeek V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then arguments in a fenced JSON block."""

from __future__ import annotations

from server.text.markers import Markers, Parse
from server.text.tools.call_format import CallFormat
from server.text.tools.section import Section

SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV3(Section):
    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    starts = Markers(section_begin, call_begin)
    ends = Markers(call_end, section_end)
    inner = (SEPARATOR,)
    call_formats = (
        CallFormat(
            f"{call_begin}function{SEPARATOR}NAME\n```json\n",
            f"\n```{call_end}",
            before=section_begin,
            between="\n",
            after=section_end,
        ),
    )

    def _one(self) -> Parse[bool]:
        yield from self.source.word()
        if not (yield from self.source.literal(SEPARATOR)):
            return False
        name = yield from self.source.word()
        yield from self.source.space()
        yield from self.source.literal("```json")
        if not name or not (yield from self._arguments_of(name)):
            return False
        yield from self.source.space()
        yield from self.source.literal("```")
        yield from self.source.space()
        yield from self.source.literal(self.call_end)
        return True
