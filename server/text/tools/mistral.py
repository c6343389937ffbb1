"""Tool parser of Mistral: [TOOL_CALLS] and a list of {"name": …, "arguments": {…}, "id": …} (tokenizers v3 and v7), or one
[TOOL_CALLS]name[CALL_ID]id[ARGS]{…} per call, without the id in newer tokenizers (v11, v13)."""

from __future__ import annotations

import secrets
from string import ascii_letters, digits

from server.text.markers import Markers, Parse
from server.text.tools.call_format import JSON_CALL, CallFormat
from server.text.tools.json_calls import JsonCalls


class Mistral(JsonCalls):
    starts = Markers("[TOOL_CALLS]")
    ends = Markers("</s>")
    inner = ("[CALL_ID]", "[ARGS]")
    call_formats = (
        CallFormat("[TOOL_CALLS]NAME[ARGS]", only_with="[ARGS]"),
        CallFormat(JSON_CALL, "}", before="[TOOL_CALLS] [", between=", ", after="]"),
    )

    @staticmethod
    def new_id() -> str:
        """Return a random id of nine letters and digits. Mistral's templates reject other ids."""
        return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))

    def _call(self, marker: str) -> Parse[None]:
        if (yield from self.source.space()) in ("[", "{"):
            yield from self._objects()
        elif (yield from self._named()):
            self._end()
        else:
            yield from self._fail()

    def _named(self) -> Parse[bool]:
        name = yield from self.source.word()
        id = None
        if (yield from self.source.literal("[CALL_ID]")):
            id = yield from self.source.word()
        yield from self.source.literal("[ARGS]")
        return bool(name) and (yield from self._arguments_of(name, id))
