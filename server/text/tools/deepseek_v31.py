"""DeepSeek V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>, bare JSON where V3 had a fenced block."""

from __future__ import annotations

from functools import partial

from server.text.markers import Parse
from server.text.tools.call_format import CallFormat
from server.text.tools.deepseek_v3 import CALL_END, SEPARATOR, DeepSeekV3


class DeepSeekV31(DeepSeekV3):
    call_formats = (
        CallFormat(
            f"{DeepSeekV3.call_begin}NAME{SEPARATOR}",
            CALL_END,
            before=DeepSeekV3.section_begin,
            after=DeepSeekV3.section_end,
        ),
    )

    def _one(self) -> Parse[bool]:
        yield from self.source.space()
        name = yield from self.source.word()
        if not name or not (yield from self.source.literal(SEPARATOR)):
            return False
        if not (yield from self._arguments(partial(self._begin, name), self._emit_arguments)):
            return False
        yield from self.source.space()
        yield from self.source.literal(CALL_END)
        return True
