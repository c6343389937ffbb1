"""What OpenAI's chat and completion routes answer, as the document describes it.

Answers are written as plain JSON (`frames`), for speed; a test reads what a running server says through these types, so they
cannot drift apart."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(Struct):
    """Beside `cached_tokens` those that stand for pictures, sounds and videos, of prompts that have some."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """`reasoning_tokens` of models that reason, the others of servers that guess: tokens that were guessed and checked."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class OneToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class SampledToken(OneToken):
    top_logprobs: list[OneToken]


class ChatLogprobs(Struct):
    content: list[SampledToken]
    refusal: None


class TextLogprobs(Struct):
    """With `echo` of the prompt's tokens too, of whose first nothing is known."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(Struct):
    logprob: float
    rank: int  # from 1, the most likely
    decoded_token: str


# By token id, the prompt's own and the most likely there; null for the first.
PromptLogprobs = list[dict[str, PromptToken] | None]


class TokenIds(Struct, kw_only=True):
    """With `return_token_ids`; of a stream, the prompt's come once per choice."""

    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """What the answers of all generation routes share."""

    id: str
    created: int
    model: str


class Function(Struct):
    name: str
    arguments: str  # a JSON object


class ToolCall(Struct, tag_field="type", tag="function"):
    id: str
    function: Function


class Custom(Struct):
    name: str
    input: str


class CustomToolCall(Struct, tag_field="type", tag="custom"):
    id: str
    custom: Custom


class AssistantMessage(Struct, kw_only=True):
    """`reasoning_content` is an older name of `reasoning`."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET


class ChatChoice(TokenIds, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomDelta(Struct):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first of a call has its id, type and name; the arguments, or of a custom tool the inputs, of all of them, joined, are the
    call's."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(TokenIds, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """One server-sent event (`data: …`); the last one is `data: [DONE]`. An error after the first event is an event too."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TextChoice(TokenIds, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Answer, kw_only=True):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str


class TextCompletionChunk(Answer, kw_only=True):
    """One server-sent event (`data: …`); the last one is `data: [DONE]`. An error after the first event is an event too."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
