"""Llama 3 (and 4, told to write JSON): the whole answer is {"name": …, "parameters": {…}}, or several with ; between.

No marker tells a call from an answer in JSON. It is one at the start of the text or behind <|python_tag|>, if it names a
tool of the request and holds nothing but a call's keys. Calls of Meta's built-in tools, which are Python, stay text."""

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
