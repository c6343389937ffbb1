"""What models write when they call tools, by tool parser, and what it means."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCallStart

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "where": {"type": "object"},
                "tags": {"type": "array"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, TIME]

PARIS = {"city": 'Pa"ris\n</é>', "days": 3, "metric": True, "where": {"lat": [1.5, None]}, "tags": []}
PARIS_JSON = json.dumps(PARIS, ensure_ascii=False)
CALL = f'{{"name": "get_weather", "arguments": {PARIS_JSON}}}'


@dataclass
class Meaning:
    """What all events of a text say together."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    malformed: list[tuple[int, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def add(self, event: Event) -> None:
        kind = type(event).__name__
        if not self.order or self.order[-1] != kind or isinstance(event, ToolCallStart | Malformed):
            self.order.append(kind)
        match event:
            case Text(text):
                self.text += text
            case Reasoning(text):
                self.reasoning += text
            case ToolCallStart(index, name, id):
                assert index == len(self.calls)
                self.calls.append((name, id))
                self.arguments.append("")
            case ToolArguments(index, text):
                assert index == len(self.calls) - 1
                self.arguments[index] += text
            case Malformed(index, text):
                self.malformed.append((index, text))


def meaning(codec: Any, feeds: list[str]) -> Meaning:
    whole = Meaning()
    for feed in feeds:
        for event in codec.feed(feed):
            whole.add(event)
    for event in codec.flush():
        whole.add(event)
    return whole


@dataclass(frozen=True)
class Sample:
    tool_parser: str
    written: str
    calls: list[tuple[str, dict[str, Any]]]
    text: str = ""
    reasoning: str = ""


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
CITY = 'Pa"ris\n</é>'
BOTH = [("get_weather", PARIS), ("time", {})]

SAMPLES = [
    Sample("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", BOTH[:1], "Let me see."),
    Sample("hermes", f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "time"}}\n</tool_call>\n', BOTH),
    Sample("hermes", f'<tool_call>{{"arguments": {PARIS_JSON}, "name": "get_weather"}}</tool_call>', BOTH[:1]),
    Sample("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": [1]}"}</tool_call>', [("time", {"a": [1]})]),
    Sample("hermes", '<tool_call>{"name": "time", "arguments": {"a": "x\ny"}}</tool_call>', [("time", {"a": "x\ny"})]),
    Sample("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS_JSON}}}', BOTH[:1]),
    Sample("llama3_json", f'<|python_tag|>{CALL}; {{"type": "function", "name": "time", "parameters": {{}}}}', BOTH),
    Sample("llama3_json", '{"name": "John", "age": 3}', [], '{"name": "John", "age": 3}'),
    Sample("granite", f"<|tool_call|>[{CALL}]", BOTH[:1]),
    Sample("granite", f'<tool_call>[{CALL}, {{"name": "time", "arguments": {{}}}}]', BOTH),
    Sample("granite", f"Right.\n<tool_call>\n{CALL}\n</tool_call>", BOTH[:1], "Right."),
    Sample("phi4", f'functools[{CALL}, {{"name": "time", "arguments": {{}}}}]', BOTH),
    Sample("phi4", f"<|tool_call|>[{CALL}]<|/tool_call|>", BOTH[:1]),
    Sample("phi4", "use functools.wraps, functools[0]", [], "use functools.wraps, functools[0]"),
    Sample("mistral", f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abcdefghi"}}, {{"name": "time", "arguments": {{}}}}]', BOTH),
    Sample(
        "mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}[TOOL_CALLS]time[CALL_ID]x1[ARGS]{{}}", BOTH, "Sure."
    ),
    Sample(
        "deepseek_v3",
        f"Hm.<｜tool▁calls▁begin｜>{V3.format('get_weather', PARIS_JSON)}\n{V3.format('time', '{}')}<｜tool▁calls▁end｜>",
        BOTH,
        "Hm.",
    ),
    Sample(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{V31.format('get_weather', PARIS_JSON)}{V31.format('time', '{}')}<｜tool▁calls▁end｜>\n\nDone.",
        BOTH,
        "\n\nDone.",
    ),
    Sample(
        "kimi_k2",
        f"<|tool_calls_section_begin|>{KIMI.format('get_weather', 0, PARIS_JSON)}{KIMI.format('time', 1, '{}')}"
        "<|tool_calls_section_end|>",
        BOTH,
    ),
    Sample(
        "qwen3_coder",
        f"Look:\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n<parameter=where>\n{'lat': [1.5, None]}\n</parameter>\n"
        "<parameter=tags>\n[]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        BOTH,
        "Look:",
    ),
    Sample(
        "qwen3_coder",
        "<function=get_weather><parameter=note>null</parameter><parameter=city>5</parameter></function>",
        [("get_weather", {"note": None, "city": "5"})],
    ),
    Sample(
        "glm45",
        f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value><arg_key>metric</arg_key><arg_value>true</arg_value><arg_key>where</arg_key>"
        '<arg_value>{"lat": [1.5, null]}</arg_value><arg_key>tags</arg_key><arg_value>[]</arg_value>\n</tool_call>'
        "<tool_call>time</tool_call>",
        BOTH,
    ),
    Sample(
        "pythonic",
        "[get_weather(city='Pa\"ris\\n</é>', days=3, metric=True, where={'lat': [1.5, None]}, tags=[]), time()]",
        BOTH,
    ),
    Sample(
        "pythonic",
        '<function_calls>\nget_weather(city="Pa\\"ris\n</\\xe9>", days=+3, metric=true, where={"lat": (1.5, null)}, '
        "tags=[],)\ntime()\n</function_calls>",
        BOTH,
    ),
    Sample("pythonic", "[1] is a source, [get_weather] too", [], "[1] is a source, [get_weather] too"),
    Sample("pythonic", "<|python_start|>[time()]<|python_end|>", BOTH[1:]),
    Sample(
        "functiongemma",
        f"<start_function_call>call:get_weather{{city:<escape>{CITY}<escape>,days:3, metric:true,"
        "where:{lat:[1.5,null]},tags:[]}<end_function_call><start_function_call>call:time{}<end_function_call>"
        "<start_function_response>",
        BOTH,
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Need <b> the tool.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{PARIS_JSON}<|call|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{{}}",
        BOTH,
        "Wait.",
        "Need <b> the tool.",
    ),
    Sample("harmony", " to=functions.time<|channel|>commentary<|message|><|call|>", BOTH[1:]),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi <|there|>.\n<|return|>",
        [],
        "Hi <|there|>.\n",
        "Hm.",
    ),
]
