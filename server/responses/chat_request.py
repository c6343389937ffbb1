"""ChatRequest of a ResponsesRequest: the same wishes in the words of the chat route, whose core answers them; and its
complaints in the words of this one."""

from __future__ import annotations

from typing import Final

from server.client_words import ClientWords
from server.errors import InvalidRequest
from server.responses.wire import AllowedTools, FormatSchema, FunctionTool, ResponsesRequest, ThisTool
from server.schema import (
    ChatRequest,
    FunctionName,
    FunctionSpec,
    JsonSchemaFormat,
    Message,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolChoice,
)

_SAME: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "structured_outputs", "chat_template_kwargs", "include_reasoning", "thinking_token_budget", "priority", "cache_salt",
    "parallel_tool_calls",
)  # fmt: skip
WORDS: Final = ClientWords(
    {
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
    }
)


def chat_request(wire: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    """Raises InvalidRequest for fields that contradict each other."""
    choice, tools = _tools(wire)
    request = ChatRequest(
        messages=messages,
        tools=[_tool(tool) for tool in tools] or None,
        tool_choice=choice,
        response_format=_response_format(wire),
        reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
        max_completion_tokens=wire.max_output_tokens,
        logprobs=wire.wants_logprobs,
        top_logprobs=wire.top_logprobs,
        **{name: getattr(wire, name) for name in _SAME},
    )
    with WORDS.spoken():
        request.check()
    return request


def _tools(wire: ResponsesRequest) -> tuple[ToolChoice | None, list[FunctionTool]]:
    """The choice, and those of the tools it leaves to be chosen from."""
    choice, tools = wire.tool_choice, wire.tools or []
    if isinstance(choice, ThisTool):
        return NamedTool(function=FunctionName(name=choice.name)), tools
    if not isinstance(choice, AllowedTools):
        return choice if tools or choice == "required" else None, tools
    allowed = {tool.name for tool in choice.tools}
    if unknown := sorted(allowed - {tool.name for tool in tools}):
        raise InvalidRequest(f"tool_choice allows {unknown[0]!r}, which is none of the tools", param="tool_choice")
    return choice.mode, [tool for tool in tools if tool.name in allowed]


def _tool(tool: FunctionTool) -> Tool:
    spec = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(function=spec)


def _response_format(wire: ResponsesRequest) -> ResponseFormat | None:
    format = None if wire.text is None else wire.text.format
    if not isinstance(format, FormatSchema):
        return format
    schema = NamedSchema(schema=format.schema, name=format.name, description=format.description, strict=format.strict)
    return JsonSchemaFormat(json_schema=schema)
