"""Wire type of POST /v1/responses: its fields, their limits, and what stands here only to be refused by name.

Beside OpenAI's fields those of sampling that the chat route has. Input items are plain JSON here, since a message need not say
that it is one: `input_items` reads them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from server.errors import InvalidRequest, UnsupportedParameter
from server.schema import (
    INT64,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOPS,
    MAX_TOOLS,
    AnyText,
    CacheSalt,
    JsonObject,
    Name,
    Priority,
    ReasoningEffort,
    StopString,
    StructuredOutputs,
    TokenId,
    ToolName,
    Wire,
)

LOGPROBS: Final = "message.output_text.logprobs"

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of items that no answer of this server has.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class FormatSchema(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """`strict` changes nothing: a schema is always held to."""

    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextWishes(Struct, kw_only=True, forbid_unknown_fields=True):
    format: AnyText | JsonObject | FormatSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningWishes(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning is shown as the model wrote it: there is no summary of it, whatever `summary` asks for."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Name | None = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = field(name="async", default=None)

    def check(self) -> None:
        fields = (
            ("defer_loading", self.defer_loading),
            ("allowed_callers", self.allowed_callers not in (None, ["direct"])),
            ("output_schema", self.output_schema is not None),
            ("async", self.is_async),
        )
        for name, wanted in fields:
            if wanted:
                raise UnsupportedParameter(f"tools[...].{name}")


class ThisTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: Name


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """The others may as well not be there."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ThisTool], Meta(min_length=1)]


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, kw_only=True):
    model: Name | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None  # None: if the server keeps any
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Includable] | None = None

    max_output_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=INT64)] | None = None  # of built-in tools, of which there are none
    truncation: Literal["auto", "disabled"] | None = None
    text: TextWishes | None = None
    reasoning: ReasoningWishes | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ThisTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    # As the chat route has them.
    top_k: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None

    # Harmless: they describe the caller and ask nothing of the answer.
    user: str | None = None
    metadata: Metadata | None = None
    service_tier: Name | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Fields that contradict each other, and values that are known and not served."""
        if self.background and self.store is False:
            raise InvalidRequest("background needs store: its response is there to be retrieved", param="background")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f"top_logprobs is only allowed when include has {LOGPROBS}", param="top_logprobs")
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
            if self.stream_options.include_obfuscation:
                raise UnsupportedParameter("stream_options.include_obfuscation")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise UnsupportedParameter("text.verbosity")
        if self.reasoning is not None:
            if self.reasoning.context not in (None, "auto"):
                raise UnsupportedParameter("reasoning.context")
            if self.reasoning.mode not in (None, "standard"):
                raise UnsupportedParameter("reasoning.mode")
        for tool in self.tools or ():
            tool.check()

    def left_undone(self) -> list[str]:
        """Wishes that change nothing of the answer, and are not met."""
        found: list[str] = []
        if self.reasoning is not None:
            found += [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(self.reasoning, name)]
        if "reasoning.encrypted_content" in (self.include or ()):
            found.append("include.reasoning.encrypted_content")
        return found


# Field: the values that ask for nothing. Null always asks for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "access_programs": (),
    "image": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    # Of the chat route.
    "messages": (),
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "reasoning_effort": (),
    "logprobs": (False,),
    # Of vLLM.
    "enable_response_messages": (False,),
    "previous_input_messages": (),
    "request_id": (),
    "session_id": (),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "watermarking": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
}
_REPLACED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include with {LOGPROBS}",
    "request_id": "the header X-Request-Id",
}

RESPONSES: Wire[ResponsesRequest] = Wire(
    ResponsesRequest, _REFUSED, ("prompt_cache_options", "prompt_cache_retention"), _REPLACED
)
