"""Input items: what a conversation is made of on this wire, read, checked and written back.

A message need not say that it is one. Every item gets an id, under which input_items lists it; what this server itself answers
with can be sent back as it is. Knows nothing of chats: `messages` makes one of these."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from server.errors import InvalidRequest, UnsupportedParameter
from server.schema import Json, Name, refusal_of

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Any = None

    def check(self, where: str) -> None:
        if self.prompt_cache_breakpoint is not None:
            raise UnsupportedParameter(f"{where}.prompt_cache_breakpoint")


class OutputText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: Any = None  # as they came with an answer: a conversation has no use for them

    def check(self, where: str) -> None:
        if self.annotations:
            raise UnsupportedParameter(f"{where}.annotations")


class Refusal(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal

    def check(self, where: str) -> None:
        pass


class SummaryText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    text: str


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.content] if isinstance(self.content, str) else [part.text for part in self.content]

    def check(self, where: str) -> None:
        if self.phase is not None:
            raise UnsupportedParameter(f"{where}.phase")
        if not isinstance(self.content, str):
            for number, part in enumerate(self.content):
                part.check(f"{where}.content[{number}]")


class FunctionCall(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: Status | None = None
    namespace: Any = None
    caller: Any = None

    @property
    def is_broken(self) -> bool:
        """It broke off, so it cannot be made; what was written of it is a text of its own (`response_events`)."""
        return self.status == "incomplete"

    def check(self, where: str) -> None:
        _check_caller(self, where)


class FunctionCallOutput(
    Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"
):
    call_id: Name
    output: str | list[InputText]
    id: Name | None = None
    status: Status | None = None
    name: Name | None = None
    namespace: Any = None
    caller: Any = None

    @property
    def texts(self) -> list[str]:
        return [self.output] if isinstance(self.output, str) else [part.text for part in self.output]

    def check(self, where: str) -> None:
        _check_caller(self, where)
        if not isinstance(self.output, str):
            for number, part in enumerate(self.output):
                part.check(f"{where}.output[{number}]")


class ReasoningItem(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning"):
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: Name | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        if self.content:
            return "".join(part.text for part in self.content)
        return "\n\n".join(part.text for part in self.summary)

    def check(self, where: str) -> None:
        if self.encrypted_content is not None and not self.content:
            raise UnsupportedParameter(f"{where}.encrypted_content")


class ItemReference(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="item_reference"):
    """An item of a stored response."""

    id: Name

    def check(self, where: str) -> None:
        pass


Item = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem
_DECODER = msgspec.json.Decoder(Item)
_PREFIXES = {InputMessage: "msg_", FunctionCall: "fc_", FunctionCallOutput: "fco_", ReasoningItem: "rs_"}


def _check_caller(item: FunctionCall | FunctionCallOutput, where: str) -> None:
    if item.namespace is not None:
        raise UnsupportedParameter(f"{where}.namespace")
    if item.caller not in (None, {"type": "direct"}):
        raise UnsupportedParameter(f"{where}.caller")


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def read(given: str | Sequence[Json]) -> list[Item | ItemReference]:
    """The items of `input`, in order; those that had no id have one now. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input is empty", param="input")
    return [_read(item, f"input[{number}]") for number, item in enumerate(given)]


def _read(given: Json, where: str) -> Item | ItemReference:
    if given.get("type") is None:
        is_reference = "id" in given and "role" not in given
        given = {**given, "type": "item_reference" if is_reference else "message"}
    try:
        item: Item | ItemReference = msgspec.convert(given, Item | ItemReference)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error), where=where) from None
    item.check(where)
    if not isinstance(item, ItemReference) and item.id is None:
        item.id = new_id(_PREFIXES[type(item)])
    return item


def check_outputs(items: Iterable[Item]) -> None:
    """Raises InvalidRequest for the result of a call that nobody has made."""
    called: set[str] = set()
    for item in items:
        if isinstance(item, FunctionCall) and not item.is_broken:
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in called:
            raise InvalidRequest(
                f"No tool call found for function call output with call_id {item.call_id}.", param="input"
            )


def from_json(raw: bytes) -> Item:
    """What `to_json` wrote, or an item of an answer."""
    item: Item = _DECODER.decode(raw)
    return item


def to_json(item: Item) -> Json:
    """An item as input_items lists it."""
    match item:
        case InputMessage(role=role, content=content):
            if isinstance(content, str):
                content = [OutputText(text=content) if role == "assistant" else InputText(text=content)]
            parts = list(map(_part, content))
            return {
                "id": item.id,
                "type": "message",
                "role": role,
                "status": item.status or "completed",
                "content": parts,
            }
        case FunctionCall():
            return {
                "id": item.id, "type": "function_call", "status": item.status or "completed",
                "call_id": item.call_id, "name": item.name, "arguments": item.arguments,
            }  # fmt: skip
        case FunctionCallOutput(output=output):
            shown = output if isinstance(output, str) else list(map(_part, output))
            return {
                "id": item.id, "type": "function_call_output", "status": item.status or "completed",
                "call_id": item.call_id, "output": shown,
            }  # fmt: skip
        case ReasoningItem():
            made: Json = {
                "id": item.id, "type": "reasoning",
                "summary": [{"type": "summary_text", "text": part.text} for part in item.summary],
            }  # fmt: skip
            if item.content is not None:
                made["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
            return made


def _part(part: InputText | OutputText | Refusal) -> Json:
    match part:
        case OutputText(text=text):
            return {"type": "output_text", "text": text, "annotations": []}
        case Refusal(refusal=text):
            return {"type": "refusal", "refusal": text}
        case InputText(text=text):
            return {"type": "input_text", "text": text}
