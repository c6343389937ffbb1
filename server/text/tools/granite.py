"""Tool parser of Granite: a list of calls after <|tool_call|> (3.0) or <tool_call> (3.1 to 3.3), or calls in Hermes' format (4)."""

from __future__ import annotations

from server.text.markers import Markers
from server.text.tools.call_format import JSON_CALL, CallFormat
from server.text.tools.json_calls import JsonCalls


class Granite(JsonCalls):
    starts = Markers("<|tool_call|>", "<tool_call>")
    closes = ("</tool_call>",)
    ends = Markers("</tool_call>", "<|end_of_text|>")
    call_formats = (
        CallFormat(JSON_CALL, "}", before="<|tool_call|>[", between=", ", after="]", only_with="<|tool_call|>"),
        CallFormat(f"<tool_call>\n{JSON_CALL}", "}\n</tool_call>", between="\n"),
    )
