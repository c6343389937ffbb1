"""What a client of Anthropic's API asks, as the chat request that asks the same of the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from server.anthropic.history import chat_messages, reminded, system_message, takes_system_turns
from server.anthropic.wire import (
    AnyTool,
    CustomTool,
    JsonFormat,
    MessagesRequest,
    NoTool,
    OneTool,
    PromptRequest,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
)
from server.client_words import ClientWords
from server.loaded.prompt import ChatTemplate
from server.schema import (
    ChatRequest,
    FunctionName,
    FunctionSpec,
    JsonSchemaFormat,
    NamedSchema,
    NamedTool,
    Tool,
    ToolChoice,
)

# By which templates are told whether to reason.
_SWITCHES: Final = ("enable_thinking", "thinking")
_WORDS: Final = ClientWords(
    {
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
    }
)
in_the_clients_name, in_the_clients_words = _WORDS.translated, _WORDS.spoken


@dataclass(frozen=True, slots=True)
class Asked:
    """`ignored`: what of the request does nothing. `wants_thinking`: it asks for reasoning, and `shows_thinking` for its text."""

    chat: ChatRequest
    ignored: list[str] = field(default_factory=list)
    wants_thinking: bool = False
    shows_thinking: bool = True


def asked(wire: PromptRequest, template: ChatTemplate) -> Asked:
    """Raises InvalidRequest, in the client's words."""
    head, left_out = system_message(wire.system)
    turns = wire.messages
    if any(turn.role == "system" for turn in turns) and not takes_system_turns(template):
        turns = reminded(turns)
    messages, left_out_too = chat_messages(turns)
    continued = messages[-1].role == "assistant"
    choice = wire.tool_choice
    chat = ChatRequest(
        model=wire.model,
        messages=head + messages,
        tools=[_tool(tool) for tool in wire.tools or []] or None,
        tool_choice=_tool_choice(wire),
        parallel_tool_calls=None
        if choice is None or isinstance(choice, NoTool)
        else not choice.disable_parallel_tool_use,
        continue_final_message=continued or None,
        response_format=None if wire.format is None else _format(wire.format),
        reasoning_effort=None if wire.output_config is None else wire.output_config.effort,
        **_thinking(wire, template),
    )
    if isinstance(wire, MessagesRequest):
        _add_sampling(chat, wire)
    with in_the_clients_words():
        chat.check()
    thinking = wire.thinking
    wants = isinstance(thinking, ThinkingEnabled | ThinkingAdaptive)
    shows = not (isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted")
    return Asked(chat, left_out + left_out_too, wants, shows)


def _add_sampling(chat: ChatRequest, wire: MessagesRequest) -> None:
    chat.stop = wire.stop_sequences or None
    chat.temperature, chat.top_p, chat.top_k = wire.temperature, wire.top_p, wire.top_k
    chat.stream = wire.stream
    chat.user = None if wire.metadata is None else wire.metadata.user_id
    chat.priority, chat.cache_salt = wire.priority, wire.cache_salt


def _tool(tool: CustomTool) -> Tool:
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = {**parameters, "examples": tool.input_examples}  # where JSON Schema has them
    return Tool(
        function=FunctionSpec(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)
    )


def _tool_choice(wire: PromptRequest) -> ToolChoice | None:
    match wire.tool_choice:
        case None:
            return None
        case AnyTool():
            return "required"
        case OneTool(name=name):
            return NamedTool(function=FunctionName(name=name))
        case NoTool():
            return "none"
        case _:
            return "auto"


def _format(format: JsonFormat) -> JsonSchemaFormat:
    return JsonSchemaFormat(json_schema=NamedSchema(schema=format.schema))


def _thinking(wire: PromptRequest, template: ChatTemplate) -> dict[str, Any]:
    """Fields of a ChatRequest. Where a template has no switch, reasoning is switched off by ending it as it begins."""
    given = wire.chat_template_kwargs or {}
    if wire.thinking is None:
        return {"chat_template_kwargs": given or None}
    off = isinstance(wire.thinking, ThinkingDisabled)
    switches = [name for name in _SWITCHES if template.reads(name, with_tools=bool(wire.tools))]
    fields: dict[str, Any] = {"chat_template_kwargs": {**dict.fromkeys(switches, not off), **given} or None}
    if isinstance(wire.thinking, ThinkingEnabled):
        fields["thinking_token_budget"] = wire.thinking.budget_tokens
    if off:
        fields["include_reasoning"] = False
        if not switches:
            fields["thinking_token_budget"] = 0
    return fields
