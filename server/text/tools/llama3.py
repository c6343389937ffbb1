"""Tool parser of Llama 3 and 4 (in JSON mode): the whole answer is {"name": …, "parameters": {…}}, or several objects separated by
semicolons.

No marker distinguishes a call from a JSON answer. A JSON object is a call if it names a tool of the request and has no other
keys. It must be at the start of the text or after <|python_tag|>. Calls of Meta's built-in tools are Python and remain text."""

from __future__ import annotations

from server.text.markers import Markers, Parse
from server.text.tools.call_format import CallFormat
from server.text.tools.json_calls import JsonCalls


class Llama3(JsonCalls):
    starts = Markers("<|python_tag|>")
    ends = Markers("<|eom_id|>", "<|eot_id|>")
    stops = ("<|eom_id|>", "<|eot_id|>")
    call_formats = (CallFormat('{"name": "NAME", "parameters": ', "}", between="; "),)
    bare = "{["
    any_keys = False
    any_name = False

    def _call(self, marker: str) -> Parse[None]:
        while (yield from self._objects()):
            if not (yield from self._close(";")):
                return
