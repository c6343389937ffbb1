"""Tool parser of Hermes 2 and 3, Qwen 2.5 and 3, and others: one or more <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from server.text.markers import Markers
from server.text.tools.call_format import JSON_CALL, CallFormat
from server.text.tools.json_calls import JsonCalls


class Hermes(JsonCalls):
    starts = Markers("<tool_call>")
    closes = ("</tool_call>",)
    ends = Markers("</tool_call>")
    call_formats = (CallFormat(f"<tool_call>\n{JSON_CALL}", "}\n</tool_call>", between="\n"),)
