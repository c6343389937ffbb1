"""Request types of /v1/responses, with the limits of each field and the fields that are rejected by name.

The sampling fields of the chat route are accepted too. Input items are plain JSON here; `input_items` parses them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from server.http.errors import InvalidRequest
from server.http.schema import (
    INT64,
    MAX_LOGPROBS,
    MAX_TOOLS,
    AnyText,
    ConstrainedOutput,
    InputGrammar,
    JsonObject,
    Name,
    ReasoningEffort,
    ToolName,
    Wire,
)
from server.http.wire_fields import (
    CallerFields,
    ReasoningFields,
    SamplingFields,
    TemplateFields,
    TermFields,
    TextFields,
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
    """JSON schema of the answer. `strict` has no effect, because schemas are always enforced."""

    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextWishes(Struct, kw_only=True, forbid_unknown_fields=True):
    format: AnyText | JsonObject | FormatSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningWishes(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning options. `summary` has no effect, because reasoning is sent unchanged and without a summary."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Name | None = None


class FunctionTool(Struct, kw_only=True, tag_field="type", tag="function"):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = field(name="async", default=None)


class TextFormat(Struct, kw_only=True, tag_field="type", tag="text"):
    pass


class GrammarFormat(InputGrammar, kw_only=True, tag_field="type", tag="grammar"):
    pass


class CustomTool(Struct, kw_only=True, tag_field="type", tag="custom"):
    """Custom tool, whose call has a text as input instead of JSON arguments."""

    name: ToolName
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    is_async: bool | None = field(name="async", default=None)


class NamespaceTool(Struct, kw_only=True, tag_field="type", tag="namespace"):
    """Namespace that contains functions and custom tools."""

    name: ToolName
    description: str = ""
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class ThisTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: Name
    namespace: Name | None = None


class ThisCustomTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    name: Name
    namespace: Name | None = None


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Tool choice that hides all tools except `tools`. Each is given by type and name."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(
    SamplingFields,
    TextFields,
    ConstrainedOutput,
    TemplateFields,
    ReasoningFields,
    TermFields,
    CallerFields,
    kw_only=True,
):
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
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None  # read by `tools`
    tool_choice: Literal["none", "auto", "required"] | ThisTool | ThisCustomTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None

    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    mm_processor_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None
    service_tier: Name | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other or have unsupported values."""
        self.check_constraints()
        if self.background and self.store is False:
            raise InvalidRequest("background requires store, so that the response can be retrieved", param="background")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f"top_logprobs is only allowed when include has {LOGPROBS}", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")

    def left_undone(self) -> list[str]:
        """Names of the fields that are set but have no effect."""
        found: list[str] = []
        if self.reasoning is not None:
            found += [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(self.reasoning, name)]
            if self.reasoning.context not in (None, "auto"):
                found.append("reasoning.context")
            if self.reasoning.mode not in (None, "standard"):
                found.append("reasoning.mode")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found.append("text.verbosity")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            found.append("stream_options.include_obfuscation")
        return found

    @property
    def wants_sealed_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())


class CountRequest(ResponsesRequest, kw_only=True):
    """Body of /v1/responses/input_tokens. `input` is optional if `previous_response_id` is set."""

    input: str | list[dict[str, Any]] = field(default_factory=list)


class CompactRequest(CountRequest, kw_only=True):
    """Body of /v1/responses/compact."""


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
    "max_new_tokens": (),
    "num_predict": (),
    "n_predict": (),
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
}
_REPLACED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "num_predict": "max_output_tokens",
    "n_predict": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include with {LOGPROBS}",
    "request_id": "the header X-Request-Id",
}

# What may as well be left undone if the client is told.
_MAY_BE_IGNORED = ("prompt_cache_options", "prompt_cache_retention", "context_management", "session_id")

RESPONSES: Wire[ResponsesRequest] = Wire(ResponsesRequest, _REFUSED, _MAY_BE_IGNORED, _REPLACED)
COUNT: Wire[CountRequest] = Wire(CountRequest, _REFUSED, _MAY_BE_IGNORED, _REPLACED)
COMPACT: Wire[CompactRequest] = Wire(CompactRequest, _REFUSED, _MAY_BE_IGNORED, _REPLACED)
