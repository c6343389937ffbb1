"""What goes over the wire of /v1/responses, as types: for the OpenAPI document, and for the tests that hold answers to it."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from server.api.responses import input_items
from server.api.responses.body import Status
from server.api.responses.input_items import ItemReference
from server.api.responses.output_items import ItemStatus
from server.api.responses.request_types import (
    CompactRequest,
    CountRequest,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
)
from server.http.schema import Json

AnyTool = FunctionTool | CustomTool | NamespaceTool


class CreateResponse(ResponsesRequest, kw_only=True):
    """Items of type message need not say so. `item_reference`: an item of a stored response. Tools of other types (web_search,
    mcp, local_shell …) are left out, and named in X-Ignored-Fields."""

    input: str | list[input_items.Item | ItemReference]  # type: ignore[assignment]  # in the request they are still JSON
    tools: list[AnyTool] | None = None  # type: ignore[assignment]  # as well


class CountTokens(CountRequest, kw_only=True):
    input: str | list[input_items.Item | ItemReference] = ""  # type: ignore[assignment]
    tools: list[AnyTool] | None = None  # type: ignore[assignment]


class CompactResponse(CompactRequest, kw_only=True):
    input: str | list[input_items.Item | ItemReference] = ""  # type: ignore[assignment]
    tools: list[AnyTool] | None = None  # type: ignore[assignment]


# --- items --------------------------------------------------------------------------------------------------------


class ResponseToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ResponseSampledToken(ResponseToken):
    top_logprobs: list[ResponseToken]


class OutputTextPart(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """`logprobs`: with `include`, else empty."""

    text: str
    annotations: list[Json]
    logprobs: list[ResponseSampledToken]


class ReasoningTextPart(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextPart]


class ReasoningOutput(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought, as it wrote it; `summary` is empty."""

    id: str
    status: ItemStatus
    summary: list[input_items.SummaryText]
    content: list[ReasoningTextPart]
    encrypted_content: str | UnsetType = UNSET  # with `include`: to be sent back, where its content is not


class FunctionCallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """`incomplete`: it broke off, and what was written of it follows as text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


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


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseReasoning(Struct):
    effort: str | None
    summary: str | None


class ResponseText(Struct):
    format: Json
    verbosity: str


class Response(Struct, kw_only=True):
    """`store`: whether it can be retrieved and continued, as long as the server keeps it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class InputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactionItem(Struct, kw_only=True, tag_field="type", tag="compaction"):
    """Stands for the conversation in the input of later requests; only this server reads it, and nothing is secret in it."""

    id: str
    encrypted_content: str


class CompactedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[input_items.InputMessage | CompactionItem]
    usage: ResponseUsage


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Struct):
    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --- events -------------------------------------------------------------------------------------------------------


class _Event(Struct, kw_only=True, tag_field="type"):
    sequence_number: int


class _OfResponse(_Event, kw_only=True):
    response: Response


class _OfItem(_Event, kw_only=True):
    output_index: int


class _OfPiece(_OfItem, kw_only=True):
    item_id: str


class _OfPart(_OfPiece, kw_only=True):
    content_index: int


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseQueued(_OfResponse, tag="response.queued"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    """It was cut off, or cancelled: its status says which."""


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class OutputItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class OutputItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class ContentPartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    part: OutputTextPart | ReasoningTextPart


class ContentPartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    part: OutputTextPart | ReasoningTextPart


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ResponseSampledToken]


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ResponseSampledToken]


class ReasoningTextDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class FunctionCallArgumentsDelta(_OfPiece, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionCallArgumentsDone(_OfPiece, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomToolCallInputDelta(_OfPiece, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomToolCallInputDone(_OfPiece, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


# One server-sent event, whose `event:` line has its type. The last is one of completed, incomplete and failed.
ResponseEvent = (
    ResponseCreated | ResponseQueued | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed
    | OutputItemAdded | OutputItemDone | ContentPartAdded | ContentPartDone | OutputTextDelta | OutputTextDone
    | ReasoningTextDelta | ReasoningTextDone | FunctionCallArgumentsDelta | FunctionCallArgumentsDone
    | CustomToolCallInputDelta | CustomToolCallInputDone
)  # fmt: skip
