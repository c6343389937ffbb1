"""Wire types of a conversation in OpenAI's format: messages, their parts, tools and tool choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from server.http.errors import InvalidRequest, UnsupportedParameter
from server.http.schema import MAX_TOOLS, InputGrammar, Name, ReasoningEffort, ToolName
from server.http.wire_fields import TemplateFields
from server.media.part import Base64, MediaPart, Modality, Url, file_part


class ImageUrl(Struct, kw_only=True, forbid_unknown_fields=True):
    """Image by URL. `detail` has no effect, because the model's processor determines the resolution."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str
    cache_control: Any = None


class InputImagePart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"):
    """Image part in the format of the Responses API."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(Struct, kw_only=True, forbid_unknown_fields=True):
    """Audio in base64. `format` is ignored, because the format is detected from the file's contents."""

    data: str
    format: str | None = None


class InputAudioPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"):
    input_audio: InputAudio
    cache_control: Any = None


class MediaUrl(Struct, kw_only=True, forbid_unknown_fields=True):
    url: str


class AudioPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl | str
    cache_control: Any = None


class VideoPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="video_url"):
    video_url: MediaUrl | str
    cache_control: Any = None


class File(Struct, kw_only=True, forbid_unknown_fields=True):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="file"):
    file: File
    cache_control: Any = None


class ImageEmbedsPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image_embeds"):
    """Precomputed image embeddings: a safetensors file in base64."""

    image_embeds: str


class AudioEmbedsPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="audio_embeds"):
    audio_embeds: str


AnyMediaPart = (
    ImagePart | InputImagePart | InputAudioPart | AudioPart | VideoPart | FilePart | ImageEmbedsPart | AudioEmbedsPart
)


def media_part(part: AnyMediaPart, where: str) -> MediaPart:
    """Convert `part` to a MediaPart. `where`: path of the part. Raises InvalidRequest if the part has no image, audio or video."""
    match part:
        case ImagePart(image_url=given):
            return _of_url("image", given, f"{where}.image_url", "image_url")
        case AudioPart(audio_url=given):
            return _of_url("audio", given, f"{where}.audio_url", "audio_url")
        case VideoPart(video_url=given):
            return _of_url("video", given, f"{where}.video_url", "video_url")
        case InputAudioPart(input_audio=given):
            return MediaPart("audio", Base64(given.data), f"{where}.input_audio.data", "input_audio")
        case ImageEmbedsPart(image_embeds=text):
            return MediaPart("image", Base64(text), f"{where}.image_embeds", "image_embeds", is_embeds=True)
        case AudioEmbedsPart(audio_embeds=text):
            return MediaPart("audio", Base64(text), f"{where}.audio_embeds", "audio_embeds", is_embeds=True)
        case InputImagePart():
            return input_image(part.image_url, part.file_id, where)
        case FilePart(file=given):
            return input_file(given.file_data, given.file_id, f"{where}.file", "file")


def input_image(url: str | None, file_id: str | None, where: str) -> MediaPart:
    """Convert an image part of the Responses API to a MediaPart. `where`: path of the part. Raises InvalidRequest."""
    if file_id is not None:
        raise UnsupportedParameter(f"{where}.file_id", instead="image_url")
    if url is None:
        raise InvalidRequest(f"Missing required parameter: {where}.image_url", param=f"{where}.image_url")
    return MediaPart("image", Url(url), f"{where}.image_url", "input_image")


def input_file(data: str | None, file_id: str | None, where: str, kind: str) -> MediaPart:
    """Convert an attached file to a MediaPart. `where`: path of the part. `kind`: its type name. Raises InvalidRequest."""
    if file_id is not None:
        raise UnsupportedParameter(f"{where}.file_id", instead="file_data")
    if data is None:
        raise InvalidRequest(f"Missing required parameter: {where}.file_data", param=f"{where}.file_data")
    return file_part(data, f"{where}.file_data", kind)


def _of_url(modality: Modality, given: ImageUrl | MediaUrl | str, where: str, kind: str) -> MediaPart:
    if isinstance(given, str):
        return MediaPart(modality, Url(given), where, kind)
    return MediaPart(modality, Url(given.url), f"{where}.url", kind)


class TextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text part. `cache_control` has no effect, because prefixes are always cached."""

    text: str
    cache_control: Any = None


class InputTextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """Text part with the type name of the Responses API."""

    text: str


class OutputTextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


AnyTextPart = TextPart | InputTextPart | OutputTextPart | RefusalPart


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    arguments: str | dict[str, Any]  # OpenAI's is a string of JSON


class CalledCustom(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    input: str


class PastCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool call of an earlier message: of a function or a custom tool."""

    id: Name
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: int | None = None  # of a streamed call, which some clients send back

    def check(self, where: str) -> None:
        other = "custom" if self.type == "function" else "function"
        if getattr(self, self.type) is None:
            raise InvalidRequest(f"Missing required parameter: {where}.{self.type}", param=f"{where}.{self.type}")
        if getattr(self, other) is not None:
            raise InvalidRequest(
                f"{where}.{other} is only allowed with type {other}, not {self.type}", param=f"{where}.{other}"
            )


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[AnyTextPart | AnyMediaPart] | None = None
    name: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: Name | None = None
    function_call: CalledFunction | None = None
    audio: Any = None
    annotations: Any = None
    provider_specific_fields: Any = (
        None  # LiteLLM's notes on an answer of ours, which it sends back; nothing for a prompt
    )

    def check(self, where: str) -> None:
        for name in ("audio", "annotations"):
            if getattr(self, name) not in (None, []):
                raise UnsupportedParameter(f"{where}.{name}")
        for name in ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise InvalidRequest(f"{where}.{name} is only allowed with role assistant", param=f"{where}.{name}")
        if self.role not in ("user", "tool") and isinstance(self.content, list):
            for number, part in enumerate(self.content):
                if isinstance(part, AnyMediaPart):
                    place, kind = f"{where}.content[{number}]", part.__struct_config__.tag
                    raise InvalidRequest(f"{place} of type {kind} is only allowed with role user or tool", param=place)
        for number, call in enumerate(self.tool_calls or []):
            call.check(f"{where}.tool_calls[{number}]")
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequest(f"{where}.tool_call_id is only allowed with role tool", param=f"{where}.tool_call_id")
        if self.tool_call_id is None and self.role == "tool":
            raise InvalidRequest(
                f"{where}.tool_call_id is missing: set it to the id of the call", param=f"{where}.tool_call_id"
            )
        if self.name is None and self.role == "function":
            raise InvalidRequest(
                f"{where}.name is missing: set it to the name of the called function", param=f"{where}.name"
            )
        if self.content is None and not (self.tool_calls or self.function_call or self.refusal is not None):
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")


Messages = Annotated[list[Message], Meta(min_length=1)]


class FunctionSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments; None: there are none
    strict: bool | None = None  # calls keep to the schema


class Tool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionSpec

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def is_constrained(self) -> bool:
        return bool(self.function.strict)


class TextInput(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class Grammar(InputGrammar, kw_only=True, forbid_unknown_fields=True):
    pass


class GrammarInput(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    grammar: Grammar


class CustomSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class CustomTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    """Custom tool, whose call has a text as input instead of JSON arguments."""

    custom: CustomSpec

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def grammar(self) -> Grammar | None:
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarInput) else None

    @property
    def is_constrained(self) -> bool:
        return self.grammar is not None


class ToolRef(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: ToolRef

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    custom: ToolRef

    @property
    def name(self) -> str:
        return self.custom.name


class Allowed(Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Tool choice that hides all tools except the listed ones."""

    allowed_tools: Allowed


Tools = Annotated[list[Tool | CustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools


class TurnFields(TemplateFields, kw_only=True):
    """Fields that control how messages are rendered to a prompt. Used for generation and pooling."""

    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer goes on in the last message, the assistant's

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise InvalidRequest if these fields contradict each other or `messages`."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other: either the last message goes on, or a "
                "new one begins",
                param="continue_final_message",
            )
        for index, message in enumerate(messages):
            message.check(f"messages[{index}]")


class ConversationFields(TurnFields, kw_only=True):
    """Fields of a conversation other than its messages."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # None: auto, if there are tools
    mm_processor_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
