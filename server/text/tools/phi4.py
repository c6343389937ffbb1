"""Tool parser of Phi-4-mini: a list of calls after `functools`, or between <|tool_call|> and <|/tool_call|>."""

from __future__ import annotations

from server.text.markers import Markers
from server.text.tools.call_format import JSON_CALL, CallFormat
from server.text.tools.json_calls import JsonCalls


class Phi4(JsonCalls):
    starts = Markers("functools[", "<|tool_call|>", "<|tool_calls|>")
    closes = ("<|/tool_call|>", "<|/tool_calls|>")
    ends = Markers("<|/tool_call|>", "<|/tool_calls|>", "<|end|>")
    call_formats = (
        CallFormat(
            JSON_CALL, "}", before="<|tool_call|>[", between=", ", after="]<|/tool_call|>", only_with="<|tool_call|>"
        ),
        CallFormat(JSON_CALL, "}", before="functools[", between=", ", after="]"),
    )
