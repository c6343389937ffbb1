"""What the server says on Anthropic's routes, as types: for the OpenAPI document, and for the test that reads answers by them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(Struct):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together. Of a stream, so far."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET  # of models that reason
    service_tier: Literal["standard"] | UnsetType = UNSET


class AnthropicMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Struct):
    input_tokens: int


class ErrorCode(Struct):
    error_code: str


class AnthropicErrorDetails(Struct, kw_only=True):
    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET  # where a client can do something about it


class AnthropicError(Struct):
    type: Literal["error"]
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


class Stopped(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Stopped
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class ErrorEvent(Struct, tag_field="type", tag="error"):
    error: AnthropicErrorDetails
    request_id: str


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | Ping
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | ErrorEvent
)
