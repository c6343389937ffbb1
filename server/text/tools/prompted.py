"""Tool support for a model whose chat template has none: the system message describes the tools, and messages contain the calls and
results as text.

The format is Hermes', which most models have seen in training, so the Hermes parser reads the answers. Only text is added to
OpenAI messages, so any template with system, user and assistant roles works."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.text.tools.hermes import Hermes

Message = Mapping[str, Any]

TOOL_PARSER: Final = Hermes

_INSTRUCTIONS: Final = """\
# Tools

These functions can be called. Their signatures, one a line, in JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between tags, and nothing behind the last call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a description of `tools` in the system message, which is added if missing. Tool calls and results
    are converted to text."""
    seen: list[dict[str, Any]] = []
    behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if not is_result:
            seen.append(_without_calls(message))
        elif behind_result:
            seen[-1]["content"] += "\n" + _result(message)  # one turn, since many templates want them to alternate
        else:
            seen.append({"role": "user", "content": _result(message)})
        behind_result = is_result
    return _introduced(seen, tools) if tools else seen


def _introduced(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_calls(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [_text(message), *map(_call, calls)]))}


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n</tool_call>'


def _result(message: Message) -> str:
    return f"<tool_response>\n{_text(message)}\n</tool_response>"


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
