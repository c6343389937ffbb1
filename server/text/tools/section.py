"""Base of tool parsers for formats with a section of calls, each call between markers: DeepSeek and Kimi."""

from __future__ import annotations

from typing import ClassVar

from server.text.markers import Parse
from server.text.tools.tool_parser import ToolParser


class Section(ToolParser):
    """Base class of tool parsers for calls within a section. `starts` contains the start markers of both section and call, since
    models sometimes omit the section's marker."""

    section_begin: ClassVar[str]
    section_end: ClassVar[str]
    call_begin: ClassVar[str]
    call_end: ClassVar[str]

    def _call(self, marker: str) -> Parse[None]:
        if marker == self.section_begin:
            yield from self.source.space()
            if not (yield from self.source.literal(self.call_begin)):
                yield from self._fail()
                return
        while True:
            if (yield from self._one()):
                self._end()
            else:
                yield from self._fail()
            closed = yield from self._close(self.call_begin, self.section_end)
            if closed and not self._behind_call:  # what stood before was text, and so is what came after it
                taken = self.source.recorded()
                self._emit_text(taken.removesuffix(self.call_begin))
            if closed != self.call_begin:
                return
            self.source.record(self.call_begin)

    def _one(self) -> Parse[bool]:
        """Parse one call after its start marker, end marker included. Return False if the call is invalid."""
        raise NotImplementedError

    def _rest(self, name: str, id: str | None = None) -> Parse[bool]:
        if not (yield from self._arguments_of(name, id)):
            return False
        yield from self.source.space()
        yield from self.source.literal(self.call_end)
        return True
