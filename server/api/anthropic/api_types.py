"""Response types of Anthropic's routes, for encoding and for the OpenAPI document.

A field whose default is UNSET is omitted unless it is set; all other fields are always present."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.api import FinishReason
from server.generate.generation import TOOL_CALLS, Choice, Generation

# Clients send a block of thinking back with its signature, and drop one that has none. Nothing is sealed by it.
SIGNATURE = "unsigned"
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = SIGNATURE


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """Token counts; in a stream, the counts up to this event. The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int  # 0: writing to the cache costs nothing
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET  # of models that reason
    service_tier: Literal["standard"] | UnsetType = UNSET  # of a message

    @classmethod
    def of(cls, generation: Generation, service_tier: Literal["standard"] | UnsetType = UNSET) -> MessageUsage:
        cached = generation.num_cached_tokens
        details = ThinkingTokens(generation.num_reasoning_tokens) if generation.reasons else UNSET
        computed = generation.num_prompt_tokens - cached
        return cls(computed, 0, cached, generation.num_completion_tokens, details, service_tier)


class Stopped(Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None = None

    @classmethod
    def of(cls, choice: Choice, *, context_was_short: bool) -> Stopped:
        """Return the stop reason of `choice`. `context_was_short`: the context had fewer than max_tokens tokens left."""
        if choice.finish_reason == FinishReason.LENGTH:
            return cls("model_context_window_exceeded" if context_was_short else "max_tokens")
        if choice.finish_reason == TOOL_CALLS:
            return cls("tool_use")
        if isinstance(choice.stop_reason, str):
            return cls("stop_sequence", choice.stop_reason)
        return cls("end_turn")


class AnthropicMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage

    @classmethod
    def of(
        cls, id: str, model: str, content: list[Content], stopped: Stopped, generation: Generation
    ) -> AnthropicMessage:
        return cls(
            id=id, model=model, content=content, stop_reason=stopped.stop_reason, stop_sequence=stopped.stop_sequence,
            usage=MessageUsage.of(generation, "standard"),
        )  # fmt: skip


class InputTokens(Struct):
    input_tokens: int


class ErrorCode(Struct):
    error_code: str


class AnthropicErrorDetails(Struct):
    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET  # where a client can do something about it


class AnthropicError(Struct, tag_field="type", tag="error"):
    """Body of an error response, and event that reports an error in a stream."""

    error: AnthropicErrorDetails
    request_id: str


# --- events -------------------------------------------------------------------------------------------------------


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Content


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Stopped
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | Ping
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError
)
