"""Input items of the Responses API: parsing, validation and encoding.

Messages may omit their type. Every item without an id gets one, under which the route input_items lists it. This server's output
items are valid input items. `messages` converts items to chat messages."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from server.api.openai.conversation_types import InputAudio as AudioData
from server.api.openai.conversation_types import input_file, input_image
from server.http.errors import InvalidRequest, UnknownParameter, UnsupportedParameter, clip
from server.http.schema import Json, Name, refusal_of
from server.media.part import Base64, MediaPart

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


class InputImage(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"):
    """Image part. `detail` has no effect, because the model's processor determines the resolution."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    def check(self, where: str) -> None:
        self.media(where)

    def media(self, where: str) -> MediaPart:
        """Convert the part to a MediaPart. `where`: path of the part. Raises InvalidRequest."""
        return input_image(self.image_url, self.file_id, where)


class InputFile(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_file"):
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Literal["auto", "low", "high"] | None = None

    def check(self, where: str) -> None:
        self.media(where)

    def media(self, where: str) -> MediaPart:
        """Convert the part to a MediaPart. `where`: path of the part. Raises InvalidRequest."""
        if self.file_url is not None:
            raise UnsupportedParameter(f"{where}.file_url", instead="file_data")
        return input_file(self.file_data, self.file_id, where, "input_file")


class InputAudio(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"):
    input_audio: AudioData

    def check(self, where: str) -> None:
        pass

    def media(self, where: str) -> MediaPart:
        """Convert the part to a MediaPart. `where`: path of the part."""
        return MediaPart("audio", Base64(self.input_audio.data), f"{where}.input_audio.data", "input_audio")


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


class _Placed(Struct, dict=True):
    """Base class of items that store their path in the request for error messages. Stored items have the path "input"."""

    @property
    def place(self) -> str:
        return str(self.__dict__.get("place_", "input"))

    def stands_at(self, where: str) -> None:
        self.__dict__["place_"] = where


AnyMedia = InputImage | InputFile | InputAudio


class InputMessage(_Placed, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal | AnyMedia]
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def pieces(self) -> list[str | MediaPart]:
        return [self.content] if isinstance(self.content, str) else _pieces(self.content, f"{self.place}.content")

    def check(self, where: str) -> None:
        self.stands_at(where)
        if not isinstance(self.content, str):
            for number, part in enumerate(self.content):
                place = f"{where}.content[{number}]"
                if self.role != "user" and isinstance(part, AnyMedia):
                    kind = part.__struct_config__.tag
                    raise InvalidRequest(f"{place} of type {kind} is only allowed with role user", param=place)
                part.check(place)


class _Call(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool call of an earlier response. `namespace`: namespace of the tool, or None."""

    call_id: Name
    name: Name
    id: Name | None = None
    status: Status | None = None
    namespace: Name | None = None
    caller: Any = None

    @property
    def is_broken(self) -> bool:
        """True if the call was cut off and cannot be executed. Another item then has its text (`events.py`)."""
        return self.status == "incomplete"

    def check(self, where: str) -> None:
        _check_caller(self.caller, where)


class FunctionCall(_Call, kw_only=True, tag_field="type", tag="function_call"):
    arguments: str


class CustomToolCall(_Call, kw_only=True, tag_field="type", tag="custom_tool_call"):
    input: str


class _CallOutput(_Placed, kw_only=True, forbid_unknown_fields=True):
    call_id: Name
    output: str | list[InputText | InputImage | InputFile]
    id: Name | None = None
    status: Status | None = None
    name: Name | None = None
    namespace: Name | None = None
    caller: Any = None

    @property
    def pieces(self) -> list[str | MediaPart]:
        return [self.output] if isinstance(self.output, str) else _pieces(self.output, f"{self.place}.output")

    def check(self, where: str) -> None:
        self.stands_at(where)
        _check_caller(self.caller, where)
        if not isinstance(self.output, str):
            for number, part in enumerate(self.output):
                part.check(f"{where}.output[{number}]")


class FunctionCallOutput(_CallOutput, kw_only=True, tag_field="type", tag="function_call_output"):
    pass


class CustomToolCallOutput(_CallOutput, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    pass


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
        sealed = None if self.encrypted_content is None else unseal(self.encrypted_content)
        return "\n\n".join(part.text for part in self.summary) if sealed is None else sealed

    def check(self, where: str) -> None:
        pass


class CompactionItem(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="compaction"):
    """Compacted conversation, as returned by /v1/responses/compact."""

    encrypted_content: str
    id: Name | None = None
    created_by: str | None = None

    @property
    def text(self) -> str:
        return unseal(self.encrypted_content) or ""

    def check(self, where: str) -> None:
        if unseal(self.encrypted_content) is None:
            raise InvalidRequest(
                f"{where}.encrypted_content was created by another server and cannot be decoded here",
                param=f"{where}.encrypted_content",
            )


class ItemReference(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="item_reference"):
    """Reference to an item of a stored response."""

    id: Name

    def check(self, where: str) -> None:
        pass


AnyCall = FunctionCall | CustomToolCall
AnyCallOutput = FunctionCallOutput | CustomToolCallOutput
Item = (
    InputMessage
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | ReasoningItem
    | CompactionItem
)
_DECODER = msgspec.json.Decoder(Item)
_PREFIXES = {
    InputMessage: "msg_", FunctionCall: "fc_", FunctionCallOutput: "fco_", CustomToolCall: "ctc_",
    CustomToolCallOutput: "ctco_", ReasoningItem: "rs_", CompactionItem: "cmp_",
}  # fmt: skip


def _check_caller(caller: Any, where: str) -> None:
    if caller not in (None, {"type": "direct"}):
        raise UnsupportedParameter(f"{where}.caller")


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def read(given: str | Sequence[Json], ignored: list[str] | None = None) -> list[Item | ItemReference]:
    """Parse the field `input`. Return its items in order; items without an id get one. Unknown fields are dropped, and their names
    are added to `ignored`.

    Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input is empty", param="input")
    unread: dict[str, None] = {}
    items = [_read(item, f"input[{number}]", None if ignored is None else unread) for number, item in enumerate(given)]
    if ignored is not None:
        ignored += unread
    return items


def _read(given: Json, where: str, unread: dict[str, None] | None) -> Item | ItemReference:
    if given.get("type") is None:
        is_reference = "id" in given and "role" not in given
        given = {**given, "type": "item_reference" if is_reference else "message"}
    try:
        item: Item | ItemReference = msgspec.convert(given, Item | ItemReference)
    except msgspec.ValidationError as error:
        try:
            raise refusal_of(str(error), where=where) from None
        except UnknownParameter as refusal:
            name = (refusal.param or "").removeprefix(f"{where}.")
            if unread is None or name not in given:
                raise
        unread[f"input.{clip(name)}"] = None
        return _read({key: value for key, value in given.items() if key != name}, where, unread)
    item.check(where)
    if unread is not None:
        unread |= dict.fromkeys(_unread(item))
    if not isinstance(item, ItemReference) and item.id is None:
        item.id = new_id(_PREFIXES[type(item)])
    return item


def _unread(item: Item | ItemReference) -> list[str]:
    """Return the names of the item's fields that no chat template uses."""
    if isinstance(item, InputMessage) and item.phase is not None:
        return ["input.phase"]
    if isinstance(item, ReasoningItem) and item.encrypted_content and not item.content:
        return [] if unseal(item.encrypted_content) is not None else ["input.encrypted_content"]
    return []


def check_outputs(items: Iterable[Item]) -> None:
    """Raise InvalidRequest if a tool result in `items` has no preceding call."""
    called: set[str] = set()
    for item in items:
        if isinstance(item, AnyCall) and not item.is_broken:
            called.add(item.call_id)
        elif isinstance(item, AnyCallOutput) and item.call_id not in called:
            kind = "function" if isinstance(item, FunctionCallOutput) else "custom tool"
            raise InvalidRequest(
                f"No tool call found for {kind} call output with call_id {item.call_id}.", param="input"
            )


def from_json(raw: bytes) -> Item:
    """Decode an item that `to_json` encoded, or an output item of a response."""
    item: Item = _DECODER.decode(raw)
    return item


# What of an item does nothing here, and so is not listed.
_UNLISTED = frozenset({"caller", "phase", "created_by"})
_UNLISTED_OF = {
    ReasoningItem: {"status"},
    FunctionCallOutput: {"name", "namespace"},
    CustomToolCallOutput: {"name", "namespace"},
}


def to_json(item: Item) -> Json:
    """Convert an item to JSON, as the route input_items lists it."""
    given: Json = msgspec.to_builtins(item)
    unlisted = _UNLISTED | _UNLISTED_OF.get(type(item), set())
    made = {name: value for name, value in given.items() if value is not None and name not in unlisted}
    if "status" in given and "status" not in unlisted:
        made.setdefault("status", "completed")
    if isinstance(item, InputMessage):
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            given["content"] = [{"type": kind, "text": item.content}]
        made["content"] = list(map(_part, given["content"]))
    elif isinstance(item, AnyCallOutput) and not isinstance(item.output, str):
        made["output"] = list(map(_part, given["output"]))
    return made


def _part(part: Json) -> Json:
    listed = {name: value for name, value in part.items() if value is not None and name != "logprobs"}
    return {**listed, "annotations": []} if part["type"] == "output_text" else listed


def _pieces(parts: Sequence[InputText | OutputText | Refusal | AnyMedia], where: str) -> list[str | MediaPart]:
    return [
        part.media(f"{where}[{number}]") if isinstance(part, AnyMedia) else part.text
        for number, part in enumerate(parts)
    ]


# --- sealed texts -------------------------------------------------------------------------------------------------


_MARK: Final = "oneloop1."


def seal(text: str) -> str:
    return _MARK + base64.urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(sealed: str) -> str | None:
    """Decode a text that was encoded with `seal`. Return None if `sealed` has another format."""
    if not sealed.startswith(_MARK):
        return None
    try:
        return base64.urlsafe_b64decode(sealed.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        return None
