"""From a ResponsesRequest to the core's GenerateRequest."""

from __future__ import annotations

from typing import Final

from server.errors import InvalidRequest
from server.field_names import FieldNames
from server.generate.constraints import structured_grammar
from server.generate.request import (
    Chat,
    Function,
    GenerateRequest,
    Message,
    OnlyFunction,
    OutputConstraint,
    Sampling,
    Shown,
    ToolChoice,
)
from server.responses.wire import AllowedTools, FormatSchema, FunctionTool, ResponsesRequest, ThisTool
from server.schema import JsonObject
from server.structured.grammar import ANY_OBJECT, JsonSchema

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias", "stop_token_ids", "ignore_eos",
)  # fmt: skip
NAMES: Final = FieldNames(
    {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
)


def generate_request(wire: ResponsesRequest, messages: list[Message]) -> GenerateRequest:
    """Raises InvalidRequest for fields that contradict each other."""
    choice, tools = _tools(wire)
    chat = Chat(
        messages=messages,
        tools=[Function(tool.name, tool.description, tool.parameters, bool(tool.strict)) for tool in tools],
        tool_choice=choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        template_kwargs=wire.chat_template_kwargs or {},
        reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
    )
    with NAMES.spoken():
        chat.check()
    return GenerateRequest(
        prompt=chat,
        sampling=Sampling(**{name: getattr(wire, name) for name in _SAMPLING}),
        shown=Shown(
            stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
            include_stop=bool(wire.include_stop_str_in_output),
            skip_special_tokens=wire.skip_special_tokens is not False,
            reasoning=wire.include_reasoning is not False,
            logprobs=wire.top_logprobs or 0 if wire.wants_logprobs else None,
        ),
        max_tokens=wire.max_output_tokens,
        constraint=_constraint(wire),
        thinking_token_budget=wire.thinking_token_budget,
        priority=wire.priority or 0,
        cache_salt=wire.cache_salt,
    )


def _tools(wire: ResponsesRequest) -> tuple[ToolChoice | None, list[FunctionTool]]:
    """The choice, and those of the tools it leaves to be chosen from."""
    choice, tools = wire.tool_choice, wire.tools or []
    if isinstance(choice, ThisTool):
        return OnlyFunction(choice.name), tools
    if not isinstance(choice, AllowedTools):
        return choice if tools or choice == "required" else None, tools
    allowed = {tool.name for tool in choice.tools}
    if unknown := sorted(allowed - {tool.name for tool in tools}):
        raise InvalidRequest(f"tool_choice allows {unknown[0]!r}, which is none of the tools", param="tool_choice")
    return choice.mode, [tool for tool in tools if tool.name in allowed]


def _constraint(wire: ResponsesRequest) -> OutputConstraint | None:
    format, structured = None if wire.text is None else wire.text.format, wire.structured_outputs
    found: OutputConstraint | None = None
    match format:
        case JsonObject():
            found = OutputConstraint(ANY_OBJECT, "text.format")
        case FormatSchema(schema=schema):
            found = OutputConstraint(JsonSchema(schema), "text.format.schema")
    if structured is None:
        return found
    if found is not None:
        raise InvalidRequest(
            "text.format and structured_outputs each ask for a form; give one of them", param="text.format"
        )
    structured.check("structured_outputs", "structured_outputs.")
    return OutputConstraint(structured_grammar(structured), f"structured_outputs.{structured.kinds_given[0]}")
