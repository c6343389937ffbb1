"""Conversion of Anthropic's requests to GenerateRequests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from server.api.anthropic.history import chat_messages, reminded, system_message, takes_system_turns
from server.api.anthropic.request_types import (
    AnyTool,
    AutoTool,
    CustomTool,
    MessagesRequest,
    NoTool,
    OneTool,
    PromptRequest,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
)
from server.generate.request import (
    Chat,
    GenerateRequest,
    OnlyFunction,
    OutputConstraint,
    Shown,
    Thinking,
    ToolChoice,
    ToolFunction,
    json_schema,
    one_constraint,
)
from server.http.errors import FieldNames
from server.http.wire_fields import Sampling
from server.models.prompt import ChatTemplate

NAMES: Final = FieldNames(
    {"reasoning_effort": "output_config.effort", "thinking_token_budget": "thinking.budget_tokens"}
)


@dataclass(frozen=True, slots=True)
class PreparedMessages:
    """Converted request. `ignored`: fields without effect. `wants_thinking`: request reasoning. `shows_thinking`: return
    reasoning."""

    chat: Chat
    thinking: Thinking
    ignored: list[str] = field(default_factory=list)
    wants_thinking: bool = False
    shows_thinking: bool = True


def prepare(wire: PromptRequest, template: ChatTemplate) -> PreparedMessages:
    """Convert the messages and tools of a request. Raises InvalidRequest with Anthropic's field names."""
    head, left_out = system_message(wire.system)
    turns = wire.messages
    if any(turn.role == "system" for turn in turns) and not takes_system_turns(template):
        turns = reminded(turns)
    messages, left_out_too = chat_messages(turns)
    choice, thinking = wire.tool_choice, _thinking(wire, template)
    with NAMES.spoken():
        chat = Chat(
            messages=head + messages,
            tools=[_function(tool) for tool in wire.tools or []],
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=choice is None or isinstance(choice, NoTool) or not choice.disable_parallel_tool_use,
            continue_final_message=messages[-1].role == "assistant",
            template_kwargs={**thinking.switches, **(wire.chat_template_kwargs or {})},
            allow_special_tokens=wire.allow_special_tokens,
            reasoning_effort=None if wire.output_config is None else wire.output_config.effort,
        )
    wants = isinstance(wire.thinking, ThinkingEnabled | ThinkingAdaptive)
    shows = not (isinstance(wire.thinking, ThinkingEnabled | ThinkingAdaptive) and wire.thinking.display == "omitted")
    if isinstance(wire, MessagesRequest) and wire.thread is not None:
        left_out = [*left_out, "thread"]
    return PreparedMessages(chat, thinking, left_out + left_out_too, wants, shows)


def generate_request(wire: MessagesRequest, prepared: PreparedMessages) -> GenerateRequest:
    """Return the GenerateRequest. As with Anthropic, max_tokens may exceed the rest of the context."""
    return GenerateRequest(
        prompt=prepared.chat,
        sampling=Sampling(temperature=wire.temperature, top_p=wire.top_p, top_k=wire.top_k),
        shown=Shown(stop=tuple(wire.stops), reasoning=prepared.thinking.shown),
        default_max_tokens=wire.max_tokens,
        constraint=_constraint(wire),
        thinking_token_budget=prepared.thinking.budget,
        stream=bool(wire.stream),
        **wire.terms,
    )


def _function(tool: CustomTool) -> ToolFunction:
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = {**parameters, "examples": tool.input_examples}  # where JSON Schema has them
    return ToolFunction(tool.name, tool.description, parameters, bool(tool.strict))


def _tool_choice(choice: AutoTool | AnyTool | OneTool | NoTool | None) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case AnyTool():
            return "required"
        case OneTool(name=name):
            return OnlyFunction(name)
        case NoTool():
            return "none"
        case AutoTool():
            return "auto"


def _constraint(wire: MessagesRequest) -> OutputConstraint | None:
    """Return the output constraint, or None. Raises InvalidRequest if two fields define different constraints."""
    found: list[OutputConstraint] = []
    if wire.json_format is not None:
        field = "output_config.format" if wire.output_format is None else "output_format"
        found.append(json_schema(wire.json_format.schema, f"{field}.schema"))
    return one_constraint(found, wire.constraints)


def _thinking(wire: PromptRequest, template: ChatTemplate) -> Thinking:
    if wire.thinking is None:
        return Thinking()
    is_on = not isinstance(wire.thinking, ThinkingDisabled)
    budget = wire.thinking.budget_tokens if isinstance(wire.thinking, ThinkingEnabled) else None
    return Thinking.switched(template, is_on, with_tools=bool(wire.tools), budget=budget)
