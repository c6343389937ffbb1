"""Response types of OpenAI's chat and completion routes, for encoding and for the OpenAPI document.

A field whose default is UNSET is omitted unless it is set; all other fields are always present."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from server.generate.generation import Generation
from server.generate.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(Struct):
    """Number of cached tokens, and of image, audio and video tokens, in the prompts."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct, omit_defaults=True):
    """Number of reasoning tokens, and of accepted and rejected draft tokens with speculative decoding."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, generation: Generation) -> Usage:
        prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
        cached = PromptTokensDetails(generation.num_cached_tokens, **media_tokens(generation))
        used = cls(prompt, completion, prompt + completion, cached)
        if generation.reasons or generation.guesses:
            used.completion_tokens_details = details = CompletionTokensDetails()
            if generation.reasons:
                details.reasoning_tokens = generation.num_reasoning_tokens
            if generation.guesses:
                accepted = generation.num_accepted_tokens
                details.accepted_prediction_tokens = accepted
                details.rejected_prediction_tokens = generation.num_draft_tokens - accepted
        return used


def media_tokens(generation: Generation) -> dict[str, int]:
    """Return the fields image_tokens, audio_tokens and video_tokens of the prompts, without modalities that do not occur."""
    return {f"{modality}_tokens": count for modality, count in generation.num_media_tokens.items()}


class Answer(Struct, kw_only=True):
    """Fields shared by the responses of all generation routes."""

    id: str
    object: str
    created: int
    model: str


# --- chats --------------------------------------------------------------------------------------------------------


class Function(Struct):
    """Function call. `arguments`: text of a JSON object; in a delta, a piece of the text."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class Custom(Struct):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """Tool call. In a delta (with `index`), it is a piece of a call: the first piece has id, type and name, and the arguments of
    all pieces concatenate. The same applies to the input of a custom tool."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: Function | UnsetType = UNSET
    custom: Custom | UnsetType = UNSET


class AssistantMessage(Struct, kw_only=True):
    """Message of the assistant. `reasoning_content` is the older name of `reasoning`."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """Choice of a chat. `prompt_token_ids` and `token_ids` are set if the request has `return_token_ids`."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """Choice in a chunk. With `return_token_ids`, the first chunk of each choice has `prompt_token_ids`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """One server-sent event (`data: …`). The last event is `data: [DONE]`, or an error."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


# --- completions --------------------------------------------------------------------------------------------------


class TextChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Answer, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str


class TextCompletionChunk(Answer, kw_only=True):
    """One server-sent event (`data: …`). The last event is `data: [DONE]`, or an error."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
