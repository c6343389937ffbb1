"""Tool parser of DeepSeek V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>, with JSON arguments."""

from __future__ import annotations

from server.text.markers import Parse
from server.text.tools.call_format import CallFormat
from server.text.tools.deepseek_v3 import SEPARATOR, DeepSeekV3


class DeepSeekV31(DeepSeekV3):
    call_formats = (
        CallFormat(
            f"{DeepSeekV3.call_begin}NAME{SEPARATOR}",
            DeepSeekV3.call_end,
            before=DeepSeekV3.section_begin,
            after=DeepSeekV3.section_end,
        ),
    )

    def _one(self) -> Parse[bool]:
        yield from self.source.space()
        name = yield from self.source.word()
        if not name or not (yield from self.source.literal(SEPARATOR)):
            return False
        return (yield from self._rest(name))
