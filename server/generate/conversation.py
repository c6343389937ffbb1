"""Conversation: messages and tools as the ids of a prompt, with how its answers are to be read.

The chat template writes the text; what differs between what clients send and what templates read is smoothed here. A
Conversation is wire data of any route: /v1/chat/completions sends one, others can make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.errors import InvalidRequest, clip
from server.generate.preprocess import text_ids
from server.loaded.chat_format import ChatFormat, Reading
from server.loaded.model import LoadedModel
from server.loaded.prompt import ChatTemplate, PromptError
from server.offload import Offload
from server.schema import ChatRequest, Conversation, Message, PastCall, Tool
from server.text.tools import prompted

Json = dict[str, Any]

# Arguments of the rendering itself, which a request sets by its own fields or not at all.
RESERVED_KWARGS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final", "chat_template", "tokenize"}
)
# By which templates are told whether, and how much, to reason.
_EFFORT, _SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`reading` None: answers are text. `goes_on`: they continue the last message. `ignored`: fields of the request that
    this model's template does not look at, of which the client has to be told."""

    ids: list[int]
    reading: Reading | None = None
    goes_on: bool = False
    ignored: tuple[str, ...] = ()


async def chat_prompt(served: LoadedModel, offload: Offload, wire: ChatRequest) -> ChatPrompt:
    """Raises InvalidRequest where there is no template, it refuses the conversation (roles out of order …), or nobody could
    read the calls of the tools."""
    tools = tools_json(_callable_tools(wire))
    if tools and served.chat_format.dialect is None:
        raise InvalidRequest(
            "this server does not know how the model writes tool calls, so it takes no tools: start it with --tool-parser NAME",
            param="tools",
        )
    text, ids, ignored = await _render(served, offload, wire, fits=wire.truncate_prompt_tokens is None)
    goes_on = bool(wire.continue_final_message)
    reading = served.chat_format.reading(
        tools,
        begun=_reasoning_has_begun(served.chat_format, text, wire),
        parallel=wire.parallel_tool_calls is not False,
        show_reasoning=wire.include_reasoning is not False,
    )
    return ChatPrompt(ids, reading, goes_on, ignored)


async def chat_ids(served: LoadedModel, offload: Offload, wire: Conversation) -> list[int]:
    """The ids alone: what /tokenize counts is what a chat is charged. Raises InvalidRequest."""
    _, ids, _ = await _render(served, offload, wire, fits=True)
    return ids


async def _render(
    served: LoadedModel, offload: Offload, wire: Conversation, *, fits: bool
) -> tuple[str, list[int], tuple[str, ...]]:
    template, messages = served.chat_template, wire.messages or []
    tools = tools_json(_callable_tools(wire))
    kwargs = wire.chat_template_kwargs or {}
    for name in RESERVED_KWARGS & kwargs.keys():
        raise InvalidRequest(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    effort, ignored = _effort(served.chat_format, template, wire, with_tools=bool(tools))
    if template:
        asked = {"documents": "documents"} if wire.documents else {}
        asked |= {name: f"chat_template_kwargs.{clip(name)}" for name in kwargs}
        unheard = (field for name, field in asked.items() if not template.reads(name, with_tools=bool(tools)))
        ignored = (*ignored, *unheard)

    def render() -> str:
        seen = messages_json(messages)
        if served.chat_format.prompted:
            seen = prompted.told(seen, tools)
        return template.render(
            seen,
            tools=None if served.chat_format.prompted else tools or None,
            add_generation_prompt=wire.add_generation_prompt is not False,
            documents=wire.documents,
            continue_final=bool(wire.continue_final_message),
            **{**effort, **kwargs},
        )

    num_chars = sum(message.num_chars for message in messages) + sum(len(str(tool)) for tool in tools)
    try:
        text = await offload.run(num_chars, render)
    except PromptError as error:
        raise InvalidRequest(clip(error), param="messages") from None
    add_special_tokens = bool(wire.add_special_tokens)
    ids = await text_ids(served, offload, text, add_special_tokens=add_special_tokens, param="messages", fits=fits)
    return text, ids, ignored


def _callable_tools(wire: Conversation) -> Sequence[Tool]:
    """Those that the model is told of."""
    return [] if wire.tool_choice == "none" else wire.tools or []


def _effort(
    chat_format: ChatFormat, template: ChatTemplate, wire: Conversation, *, with_tools: bool
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """What the template is told of reasoning_effort, and the names of what it would not listen to."""
    effort = wire.reasoning_effort
    if effort is None or not template:
        return {}, ()
    words = chat_format.dialect.efforts if chat_format.dialect is not None else None
    if words is not None and effort not in words:
        raise InvalidRequest(
            f"reasoning_effort {effort!r} is unknown to this model; it has {', '.join(words)}", param=_EFFORT
        )
    told: dict[str, Any] = {_EFFORT: words[effort] if words else effort}
    told |= dict.fromkeys(_SWITCHES, effort != "none")
    heard = {name: value for name, value in told.items() if template.reads(name, with_tools=with_tools)}
    return heard, () if heard else (_EFFORT,)


def _reasoning_has_begun(chat_format: ChatFormat, text: str, wire: ChatRequest) -> bool:
    tags = chat_format.tags
    if tags is None:
        return False
    if not wire.continue_final_message:
        return tags.begun_by(text)
    content = messages_json(wire.messages[-1:])[0]["content"]
    return tags.begun_in(content if isinstance(content, str) else "".join(part["text"] for part in content))


# --- as templates read it -----------------------------------------------------------------------------------------


def tools_json(tools: Sequence[Tool]) -> list[Json]:
    """As templates and dialects read them: nothing is missing, and nothing stands there that is for the server alone."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def messages_json(messages: Sequence[Message]) -> list[Json]:
    """OpenAI's newer name of the system role and its older ones around functions become those that templates know; results
    carry their function's name."""
    names: dict[str, str] = {}  # of the calls so far, by id
    return [_message_json(message, number, names) for number, message in enumerate(messages)]


def _message_json(message: Message, number: int, names: dict[str, str]) -> Json:
    calls = [_call_json(call) for call in message.tool_calls or []]
    if message.function_call is not None:
        calls.append(_call_json(PastCall(id=_legacy_id(number), function=message.function_call)))
    names |= {call["id"]: call["function"]["name"] for call in calls}
    content: Any = message.content
    if isinstance(content, list):
        content = [{"type": "text", "text": part.text} for part in content]
    if content is None and not calls:
        content = message.refusal
    call_id = _legacy_id(number - 1) if message.role == "function" else message.tool_call_id
    seen: Json = {
        "role": {"developer": "system", "function": "tool"}.get(message.role, message.role),
        "content": content,
        "name": message.name or names.get(call_id or ""),
        "reasoning": message.reasoning,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
        "tool_call_id": call_id,
    }
    return {key: value for key, value in seen.items() if value is not None}


def _call_json(call: PastCall) -> Json:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _legacy_id(number: int) -> str:
    """Calls had no ids when they were functions: the place of the message stands for it. Nine characters, which Mistral's
    templates want."""
    return f"call{number:05d}"
