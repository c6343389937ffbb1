"""From a ResponsesRequest to the core's GenerateRequest."""

from __future__ import annotations

from typing import Final

from server.api.responses.request_types import FormatSchema, ResponsesRequest
from server.api.responses.tools import Tools
from server.generate.constraint import json_object, json_schema, one_constraint
from server.generate.request import Chat, GenerateRequest, Message, OutputConstraint, Shown
from server.http.errors import FieldNames
from server.http.schema import JsonObject
from server.http.wire_fields import sampling_of

NAMES: Final = FieldNames(
    {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
)


def generate_request(wire: ResponsesRequest, messages: list[Message], tools: Tools) -> GenerateRequest:
    """Raises InvalidRequest for fields that contradict each other."""
    with NAMES.spoken():
        chat = Chat(
            messages=messages,
            tools=tools.functions,
            tool_choice=tools.choice,
            parallel_tool_calls=wire.parallel_tool_calls is not False,
            template_kwargs=wire.chat_template_kwargs or {},
            processor_kwargs=wire.mm_processor_kwargs,
            allow_special_tokens=wire.allow_special_tokens,
            reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
        )
    return GenerateRequest(
        prompt=chat,
        sampling=sampling_of(wire),
        shown=Shown(
            stop=wire.stop_strings,
            include_stop=bool(wire.include_stop_str_in_output),
            skip_special_tokens=wire.skip_special_tokens is not False,
            reasoning=wire.include_reasoning is not False,
            logprobs=wire.top_logprobs or 0 if wire.wants_logprobs else None,
        ),
        max_tokens=wire.max_output_tokens,
        constraint=_constraint(wire),
        thinking_token_budget=wire.thinking_token_budget,
        **wire.terms,
    )


def _constraint(wire: ResponsesRequest) -> OutputConstraint | None:
    """Raises InvalidRequest where several fields ask for different ones."""
    found: list[OutputConstraint] = []
    match None if wire.text is None else wire.text.format:
        case JsonObject(schema=schema):
            found.append(json_object("text.format") if schema is None else json_schema(schema, "text.format"))
        case FormatSchema(schema=schema):
            found.append(json_schema(schema, "text.format.schema"))
    return one_constraint(found, wire.constraints)
