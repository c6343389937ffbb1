"""Response types and events of /v1/responses, for encoding and for the OpenAPI document.

A field whose default is UNSET is omitted unless it is set; all others are always present. `input_items` parses request items."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from server.api.openai.api_types import Usage, media_tokens
from server.api.responses import input_items
from server.api.responses.input_items import ItemReference
from server.api.responses.request_types import (
    CompactRequest,
    CountRequest,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
)
from server.api.responses.tools import Tools
from server.generate.generation import Generation
from server.generate.logprobs import SampledToken
from server.http.schema import Json

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
AnyTool = FunctionTool | CustomTool | NamespaceTool


class CreateResponse(ResponsesRequest, kw_only=True):
    """Body of /v1/responses. Messages may omit their type. `item_reference`: reference to an item of a stored response. Tools of
    other types (web_search, mcp, local_shell …) are ignored and listed in the header X-Ignored-Fields."""

    input: str | list[input_items.Item | ItemReference]  # type: ignore[assignment]  # in the request they are still JSON
    tools: list[AnyTool] | None = None  # type: ignore[assignment]  # as well


class CountTokens(CountRequest, kw_only=True):
    input: str | list[input_items.Item | ItemReference] = ""  # type: ignore[assignment]
    tools: list[AnyTool] | None = None  # type: ignore[assignment]


class CompactResponse(CompactRequest, kw_only=True):
    input: str | list[input_items.Item | ItemReference] = ""  # type: ignore[assignment]
    tools: list[AnyTool] | None = None  # type: ignore[assignment]


# --- items --------------------------------------------------------------------------------------------------------


class OutputTextPart(Struct, tag_field="type", tag="output_text"):
    """Text of an answer. `logprobs`: empty unless `include` requests log-probabilities."""

    text: str
    annotations: list[Json]
    logprobs: list[SampledToken]


class ReasoningTextPart(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputTextPart]


class ReasoningOutput(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model, unchanged. `summary` is always empty."""

    id: str
    status: ItemStatus
    summary: list[input_items.SummaryText]
    content: list[ReasoningTextPart]
    encrypted_content: str | UnsetType = UNSET  # with `include`: to be sent back, where its content is not


class _CallItem(Struct, kw_only=True):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    status: ItemStatus


class FunctionCallItem(_CallItem, kw_only=True, tag_field="type", tag="function_call"):
    """Function call. If its status is `incomplete`, the call was cut off, and a message item with its text follows."""

    arguments: str


class CustomToolCallItem(_CallItem, kw_only=True, tag_field="type", tag="custom_tool_call"):
    input: str


OutputItem = OutputMessage | ReasoningOutput | FunctionCallItem | CustomToolCallItem


# --- the response -------------------------------------------------------------------------------------------------


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, generation: Generation) -> ResponseUsage:
        used = Usage.of(generation)
        prompt = InputTokensDetails(generation.num_cached_tokens, 0, **media_tokens(generation))
        output = OutputTokensDetails(generation.num_reasoning_tokens)
        return cls(used.prompt_tokens, prompt, used.completion_tokens, output, used.total_tokens)


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseReasoning(Struct):
    effort: str | None
    summary: str | None = None


class ResponseText(Struct):
    format: Json
    verbosity: str = "medium"


# Fields of a request that its response has as they are.
_REPEATED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier", "user"
)  # fmt: skip


class Response(Struct, kw_only=True):
    """Response of /v1/responses. `store`: it can be retrieved and continued until evicted. Times are in seconds since the epoch."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    model: str
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ResponseReasoning
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: ResponseText
    tool_choice: str | Json = "auto"
    tools: list[Json] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None

    @classmethod
    def of(
        cls, id: str, created_at: int, wire: ResponsesRequest, tools: Tools, generation: Generation, *, model: str, stored: bool
    ) -> Response:  # fmt: skip
        """Return a new response to the request `wire`, without output."""
        params = generation.requests[0].sampling
        choice = wire.tool_choice or "auto"
        reasoning, text = wire.reasoning, wire.text
        format = {"type": "text"} if text is None or text.format is None else msgspec.to_builtins(text.format)
        return cls(
            id=id,
            created_at=created_at,
            model=model,
            background=bool(wire.background),
            metadata=wire.metadata or {},
            parallel_tool_calls=wire.parallel_tool_calls is not False,
            reasoning=ResponseReasoning(None if reasoning is None else reasoning.effort),
            store=stored,
            temperature=params.temperature,
            text=ResponseText(format),
            tool_choice=choice if isinstance(choice, str) else msgspec.to_builtins(choice),
            tools=list(tools.echoed),
            top_logprobs=wire.top_logprobs or 0,
            top_p=params.top_p,
            truncation=wire.truncation or "disabled",
            **{name: getattr(wire, name) for name in _REPEATED},
        )


class InputTokens(Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CompactionItem(Struct, tag_field="type", tag="compaction"):
    """Compacted conversation, to be sent as input of later requests. It is encoded in this server's own format, not encrypted."""

    id: str
    encrypted_content: str


class CompactedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[input_items.InputMessage | CompactionItem]
    usage: ResponseUsage


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --- events -------------------------------------------------------------------------------------------------------


class _OfResponse(Struct, tag_field="type"):
    response: Response
    sequence_number: int = 0


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseQueued(_OfResponse, tag="response.queued"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    """Last event of a response that was cut off or cancelled."""


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class _OfItem(Struct, tag_field="type"):
    item: OutputItem
    output_index: int = 0
    sequence_number: int = 0


class OutputItemAdded(_OfItem, tag="response.output_item.added"):
    pass


class OutputItemDone(_OfItem, tag="response.output_item.done"):
    pass


class _OfPart(Struct, tag_field="type"):
    item_id: str
    content_index: int
    part: OutputTextPart | ReasoningTextPart
    output_index: int = 0
    sequence_number: int = 0


class ContentPartAdded(_OfPart, tag="response.content_part.added"):
    pass


class ContentPartDone(_OfPart, tag="response.content_part.done"):
    pass


class OutputTextDelta(Struct, tag_field="type", tag="response.output_text.delta"):
    item_id: str
    content_index: int
    delta: str
    logprobs: list[SampledToken]
    output_index: int = 0
    sequence_number: int = 0


class OutputTextDone(Struct, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[SampledToken]
    item_id: str
    content_index: int
    output_index: int = 0
    sequence_number: int = 0


class ReasoningTextDelta(Struct, tag_field="type", tag="response.reasoning_text.delta"):
    item_id: str
    content_index: int
    delta: str
    output_index: int = 0
    sequence_number: int = 0


class ReasoningTextDone(Struct, tag_field="type", tag="response.reasoning_text.done"):
    text: str
    item_id: str
    content_index: int
    output_index: int = 0
    sequence_number: int = 0


class _CallDelta(Struct, tag_field="type"):
    item_id: str
    delta: str
    output_index: int = 0
    sequence_number: int = 0


class FunctionCallArgumentsDelta(_CallDelta, tag="response.function_call_arguments.delta"):
    pass


class CustomToolCallInputDelta(_CallDelta, tag="response.custom_tool_call_input.delta"):
    pass


class FunctionCallArgumentsDone(Struct, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    name: str
    arguments: str
    output_index: int = 0
    sequence_number: int = 0


class CustomToolCallInputDone(Struct, tag_field="type", tag="response.custom_tool_call_input.done"):
    item_id: str
    input: str
    output_index: int = 0
    sequence_number: int = 0


EventOfItem = (
    OutputItemAdded | OutputItemDone | ContentPartAdded | ContentPartDone | OutputTextDelta | OutputTextDone
    | ReasoningTextDelta | ReasoningTextDone | FunctionCallArgumentsDelta | FunctionCallArgumentsDone
    | CustomToolCallInputDelta | CustomToolCallInputDone
)  # fmt: skip
EventOfResponse = (
    ResponseCreated | ResponseQueued | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed
)
# One server-sent event, whose `event:` line has its type. The last is one of completed, incomplete and failed.
ResponseEvent = EventOfResponse | EventOfItem
