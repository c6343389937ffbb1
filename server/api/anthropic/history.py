"""Conversion of Anthropic's messages to chat messages.

A user message becomes one message per tool result, and one per text between tool results. Neighbouring messages of one role are
merged. As with Anthropic, tool calls must be answered in the next message, because templates need the call of each result. Many
templates reject or drop a system message in the middle. It then becomes a reminder in the next user message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from server.api.anthropic.blocks import (
    Base64Source,
    Block,
    ContentSource,
    DocumentBlock,
    ImageBlock,
    RedactedThinkingBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.api.anthropic.request_types import InputMessage
from server.generate.request import ChatMessage, Content, PastToolCall
from server.http.errors import InvalidRequest, clip
from server.media.part import Base64, MediaPart, Url
from server.models.prompt import ChatTemplate

BILLING = "x-anthropic-billing-header"
TOOL_PREFIX = "toolu_"
FAILED = "Error: "  # templates know no other way to say of a result that it is none
_PROBE, _ROLES = "probed-turn", ("system", "user", "system", "assistant", "user")
_Placed = tuple[Block, str]  # with its path
_ALLOWED: dict[str, tuple[type, ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, DocumentBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


def tool_use_id(call_id: str) -> str:
    """Convert a call id to Anthropic's format: "call_1" becomes "toolu_1". `_call_id` is the inverse function."""
    return TOOL_PREFIX + call_id.removeprefix("call_")


def _call_id(id: str) -> str:
    return id.removeprefix(TOOL_PREFIX)


def system_message(system: str | Sequence[TextBlock] | None) -> tuple[list[ChatMessage], list[str]]:
    """Return the system message in a list, empty if there is none, and the names of dropped blocks.

    The first block of Claude Code is a billing header that differs in every request. It is dropped to keep prefixes equal."""
    if not system:
        return [], []
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    shown = [text for text in texts if not _is_billing(text)]
    left_out = [BILLING] if len(shown) < len(texts) else []
    return ([ChatMessage(role="system", content=_content(shown))] if shown else []), left_out


def _is_billing(text: str) -> bool:
    return text.startswith(BILLING + ":") and "\n" not in text.strip()


def takes_system_turns(template: ChatTemplate) -> bool:
    """Return True if the template accepts system messages in the middle of a conversation."""
    return template.writes(
        _PROBE, [{"role": role, "content": _PROBE if at == 2 else "a"} for at, role in enumerate(_ROLES)]
    )


def reminded(messages: Sequence[InputMessage]) -> list[InputMessage]:
    """Convert system messages in the middle of a conversation to user messages with a <system-reminder>."""
    return [
        InputMessage(role="user", content=[*map(_reminder, _blocks(message, f"messages[{index}]"))])
        if message.role == "system" and message.content
        else message
        for index, message in enumerate(messages)
    ]


def _reminder(block: Block) -> Block:
    assert isinstance(block, TextBlock), "a system message has nothing else"
    return TextBlock(text=f"<system-reminder>\n{block.text}\n</system-reminder>")


def chat_messages(messages: Sequence[InputMessage]) -> tuple[list[ChatMessage], list[str]]:
    """Convert the messages. Return the chat messages, and the names of dropped blocks. Raises InvalidRequest."""
    found: list[ChatMessage] = []
    left_out: list[str] = []
    called: set[str] = set()  # and not answered yet
    for role, turn in groupby(_spoken(messages), key=lambda message: message[1].role):
        blocks: list[_Placed] = []
        for index, message in turn:
            own = _blocks(message, f"messages[{index}]")
            if any(isinstance(block, RedactedThinkingBlock) for block in own):
                left_out = ["redacted_thinking"]
            if role == "user":
                _check_results(own, called, index)
            blocks += ((block, f"messages[{index}].content[{number}]") for number, block in enumerate(own))
        if role == "user":
            _check_answered(called, index)
            found += _user_turn(blocks)
        elif role == "assistant":
            found.append(_assistant_turn([block for block, _ in blocks]))
            called |= {block.id for block, _ in blocks if isinstance(block, ToolUseBlock)}
        else:
            found.append(ChatMessage(role="system", content=_content(_pieces(blocks))))
    _check_answered(called, len(messages) - 1)
    return found, left_out


def _spoken(messages: Sequence[InputMessage]) -> Iterator[tuple[int, InputMessage]]:
    """Yield (index, message) for non-empty messages. Raises InvalidRequest for an empty one, except a final assistant message."""
    for index, message in enumerate(messages):
        if message.content:
            yield index, message
        elif message.role != "assistant" or index < len(messages) - 1 or not index:
            raise InvalidRequest(f"messages[{index}].content is empty", param=f"messages[{index}].content")


def _blocks(message: InputMessage, where: str) -> list[Block]:
    if isinstance(message.content, str):
        return [TextBlock(text=message.content)]
    for index, block in enumerate(message.content):
        if not isinstance(block, _ALLOWED[message.role]):
            kind = block.__struct_config__.tag
            place = f"{where}.content[{index}]"
            raise InvalidRequest(f"{place}: role {message.role} cannot have content of type {kind}", param=place)
    return message.content


def _check_results(blocks: Iterable[Block], called: set[str], index: int) -> None:
    """Remove the call ids that `blocks` answer from `called`. Raises InvalidRequest for a tool result without a call."""
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            continue
        if block.tool_use_id not in called:
            raise InvalidRequest(
                f"messages[{index}]: the tool_use_id {clip(block.tool_use_id)!r} of a tool_result is that of no tool_use in the "
                "turn before, or it has its result",
                param=f"messages[{index}].content",
            )
        called.remove(block.tool_use_id)


def _check_answered(called: set[str], index: int) -> None:
    if called:
        raise InvalidRequest(
            f"messages[{index}]: there is no tool_result for the tool_use {clip(sorted(called)[0])!r}",
            param=f"messages[{index}].content",
        )


def _user_turn(blocks: Iterable[_Placed]) -> Iterator[ChatMessage]:
    for is_result, group in groupby(blocks, key=lambda placed: isinstance(placed[0], ToolResultBlock)):
        if not is_result:
            yield ChatMessage(role="user", content=_content(_pieces(group)))
            continue
        for block, place in group:
            if isinstance(block, ToolResultBlock):
                yield ChatMessage(role="tool", content=_result(block, place), tool_call_id=_call_id(block.tool_use_id))


def _result(block: ToolResultBlock, place: str) -> Content:
    given = block.content
    if isinstance(given, str | None):
        pieces: list[str | MediaPart] = [given or ""]
    else:
        pieces = _pieces((one, f"{place}.content[{number}]") for number, one in enumerate(given)) or [""]
    if block.is_error:
        pieces = [FAILED + pieces[0], *pieces[1:]] if isinstance(pieces[0], str) else [FAILED, *pieces]
    return _content(pieces)


def _pieces(blocks: Iterable[_Placed]) -> list[str | MediaPart]:
    """Return the texts and media parts of `blocks`, in order."""
    found: list[str | MediaPart] = []
    for block, place in blocks:
        if isinstance(block, TextBlock):
            found.append(block.text)
        elif isinstance(block, ImageBlock):
            found.append(_picture(block, place))
        elif isinstance(block, DocumentBlock):
            found += _document(block, place)
    return found


def _picture(block: ImageBlock, place: str) -> MediaPart:
    source = block.source
    if isinstance(source, Base64Source):
        return MediaPart("image", Base64(source.data), f"{place}.source.data", "image")
    return MediaPart("image", Url(source.url), f"{place}.source.url", "image")


def _document(block: DocumentBlock, place: str) -> list[str | MediaPart]:
    head = "".join(f"{text}\n\n" for text in (block.title, block.context) if text)
    source = block.source
    if isinstance(source, TextSource):
        return [head + source.data]
    assert isinstance(source, ContentSource), "others have been refused"
    if isinstance(source.content, str):
        return [head + source.content]
    inside = _pieces((one, f"{place}.source.content[{number}]") for number, one in enumerate(source.content))
    return [head, *inside] if head else inside


def _assistant_turn(blocks: Sequence[Block]) -> ChatMessage:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    calls = [
        PastToolCall(_call_id(block.id), block.name, block.input) for block in blocks if isinstance(block, ToolUseBlock)
    ]
    return ChatMessage(
        role="assistant",
        content=_content(texts) if texts or not calls else None,
        reasoning="\n".join(thoughts) or None,
        tool_calls=calls,
    )


def _content(pieces: Sequence[str | MediaPart]) -> Content:
    if not pieces:
        return ""
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else [*pieces]
