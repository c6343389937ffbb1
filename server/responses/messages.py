"""Messages: the items of a conversation as the messages of a chat.

What a model wrote in one turn is several items here and one message there: its reasoning, its text and its calls."""

from __future__ import annotations

from collections.abc import Iterable

from server.responses.input_items import FunctionCall, FunctionCallOutput, InputMessage, Item, ReasoningItem
from server.schema import CalledFunction, Message, PastCall

REASONING_JOINT = "\n\n"


def messages_of(items: Iterable[Item], instructions: str | None) -> list[Message]:
    """`instructions` stand before everything, whatever an earlier response was told."""
    made = [] if instructions is None else [Message(role="system", content=instructions)]
    turn: Message | None = None  # the assistant's, as long as nobody else speaks
    for item in items:
        if isinstance(item, FunctionCallOutput):
            turn = None
            made.append(Message(role="tool", content=item.text, tool_call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            turn = None
            made.append(Message(role=item.role, content=item.text))
        elif not _was_broken(item):
            if turn is None or (turn.content and not turn.tool_calls and not isinstance(item, FunctionCall)):
                turn = Message(role="assistant", content="")
                made.append(turn)
            _add(turn, item)
    for message in made:
        if message.tool_calls and not message.content:
            message.content = None
    return made


def _was_broken(item: Item) -> bool:
    """A call that broke off, which cannot be made: what was written of it is a text of its own (`events`)."""
    return isinstance(item, FunctionCall) and item.status == "incomplete"


def _add(turn: Message, item: Item) -> None:
    match item:
        case ReasoningItem():
            turn.reasoning = REASONING_JOINT.join(filter(None, (turn.reasoning, item.text)))
        case FunctionCall():
            call = PastCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
            turn.tool_calls = [*(turn.tool_calls or ()), call]
        case InputMessage():
            assert isinstance(turn.content, str), "it was made here"
            turn.content += item.text
