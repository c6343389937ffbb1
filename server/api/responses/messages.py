"""Conversion of items to chat messages. Consecutive reasoning, text and call items of the assistant become one message."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from server.api.responses.input_items import (
    AnyCall,
    AnyCallOutput,
    CompactionItem,
    CustomToolCall,
    FunctionCall,
    InputMessage,
    Item,
    ReasoningItem,
)
from server.api.responses.tools import function_name
from server.generate.custom_tools import arguments_of
from server.generate.request import ChatMessage, Content, PastToolCall
from server.media.part import MediaPart
from server.models.prompt import ChatTemplate

JOINT = "\n\n"
SUMMARY = "A summary of the conversation up to here:\n\n"
_PROBE = "second-system-message"
_TWO_USERS = ({"role": "user", "content": _PROBE}, {"role": "user", "content": "a"})
_TWO_HEADS = (
    {"role": "system", "content": "a"}, {"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}
)  # fmt: skip


def messages_of(items: Iterable[Item], instructions: str | None) -> list[ChatMessage]:
    """Convert items to chat messages. `instructions` become the first message; those of earlier responses are not used."""
    made = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    turn: ChatMessage | None = None  # the assistant's, as long as nobody else speaks
    for item in items:
        if isinstance(item, AnyCallOutput):
            turn = None
            made.append(ChatMessage(role="tool", content=_content(item.pieces), tool_call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            turn = None
            role: Literal["system", "user"] = "user" if item.role == "user" else "system"
            made.append(ChatMessage(role=role, content=_content(item.pieces)))
        elif isinstance(item, CompactionItem):
            turn = None
            made.append(ChatMessage(role="user", content=SUMMARY + item.text))
        elif not (isinstance(item, AnyCall) and item.is_broken):
            if turn is None or (turn.content and not turn.tool_calls and not isinstance(item, AnyCall)):
                turn = ChatMessage(role="assistant", content="")
                made.append(turn)
            _add(turn, item)
    for message in made:
        if message.tool_calls and not message.content:
            message.content = None
    return made


def with_one_head(messages: list[ChatMessage], template: ChatTemplate) -> list[ChatMessage]:
    """Merge the instructions with the system messages after them, if the template accepts only one system message."""
    size = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    if size < 2 or template.writes(_PROBE, _TWO_HEADS):
        return messages
    parts: list[str] = []
    for message in messages[:size]:
        assert message.content is not None, "a system message has nothing else"
        parts += _texts(message)
    return [ChatMessage(role="system", content=JOINT.join(parts)), *messages[size:]]


def with_joint_turns(messages: list[ChatMessage], template: ChatTemplate) -> list[ChatMessage]:
    """Merge consecutive user messages, if the template requires that roles alternate."""
    if not any(a.role == b.role == "user" for a, b in pairwise(messages)) or template.writes(_PROBE, _TWO_USERS):
        return messages
    joint: list[ChatMessage] = []
    for message in messages:
        if joint and message.role == joint[-1].role == "user":
            joint[-1] = ChatMessage(role="user", content=_joined([*_parts(joint[-1]), *_parts(message)]))
        else:
            joint.append(message)
    return joint


def _parts(message: ChatMessage) -> list[str | MediaPart]:
    content = message.content or ""
    return [content] if isinstance(content, str) else content


def _texts(message: ChatMessage) -> list[str]:
    return [part for part in _parts(message) if isinstance(part, str)]


def _joined(parts: list[str | MediaPart]) -> Content:
    """Merge the contents of messages. The result is one text if all parts are texts."""
    texts = [part for part in parts if isinstance(part, str)]
    return JOINT.join(texts) if len(texts) == len(parts) else parts


def _content(pieces: list[str | MediaPart]) -> Content:
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else pieces


def _add(turn: ChatMessage, item: Item) -> None:
    match item:
        case ReasoningItem():
            turn.reasoning = JOINT.join(filter(None, (turn.reasoning, item.text)))
        case FunctionCall():
            call = PastToolCall(item.call_id, function_name(item.name, item.namespace), item.arguments)
            turn.tool_calls = [*turn.tool_calls, call]
        case CustomToolCall():
            call = PastToolCall(item.call_id, function_name(item.name, item.namespace), arguments_of(item.input))
            turn.tool_calls = [*turn.tool_calls, call]
        case InputMessage():
            assert isinstance(turn.content, str), "it was made here"
            turn.content += "".join(piece for piece in item.pieces if isinstance(piece, str))
