"""Request types of /v1/messages and /v1/messages/count_tokens, with the limits of each field.

Known but unsupported fields are rejected by name. Unknown fields are ignored and reported (`server/http/schema.py`). Some of
vLLM's fields are accepted too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from server.api.anthropic.blocks import Block, CacheControl, TextBlock, check_blocks
from server.api.anthropic.errors import ThreadNotFound
from server.http.errors import InvalidRequest, UnsupportedParameter, clip
from server.http.schema import (
    INT64,
    ConstrainedOutput,
    Name,
    StopString,
    T,
    ToolName,
    Wire,
)
from server.http.wire_fields import TemplateFields, TermFields

MAX_MESSAGES = 100_000
MAX_STOP_SEQUENCES = 64
MIN_BUDGET = 1024


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


# --- tools --------------------------------------------------------------------------------------------------------


class CustomTool(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # every tool's input streams as it is written
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    def check(self, where: str) -> None:
        if self.defer_loading:
            raise UnsupportedParameter(f"{where}.defer_loading")
        if self.allowed_callers not in (None, ["direct"]):
            raise UnsupportedParameter(f"{where}.allowed_callers")


class AutoTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class OneTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    pass


# --- thinking and the form of the answer --------------------------------------------------------------------------

Display = Literal["summarized", "omitted"]  # there is no summary: thinking is shown as it is, or not at all


class ThinkingEnabled(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET, le=INT64)]
    display: Display | None = None


class ThinkingAdaptive(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    pass


class JsonFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: None = None


# --- requests -----------------------------------------------------------------------------------------------------


class PromptRequest(ConstrainedOutput, TemplateFields, kw_only=True):
    """Fields that define the prompt, shared by both routes."""

    model: Name
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=512)] | None = None
    tool_choice: AutoTool | AnyTool | OneTool | NoTool | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # an older place of output_config.format
    cache_control: CacheControl | None = None

    @property
    def json_format(self) -> JsonFormat | None:
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format

    def check(self) -> None:
        self.check_constraints()
        for index, message in enumerate(self.messages):
            if isinstance(message.content, list):
                check_blocks(message.content, f"messages[{index}].content")
        if isinstance(self.system, list):
            check_blocks(self.system, "system")
        for index, tool in enumerate(self.tools or []):
            tool.check(f"tools[{index}]")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise InvalidRequest(
                "output_format is an older name of output_config.format; set only one of them", param="output_format"
            )


class ThreadCreate(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="create"):
    """Option to store the conversation on the server. It is accepted and has no effect."""


class ThreadContinue(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="continue"):
    previous_message_id: Name


class CountRequest(PromptRequest, kw_only=True):
    pass


class MessagesRequest(PromptRequest, TermFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0, le=INT64)]  # 0: the prompt is cached, nothing generated
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_SEQUENCES)] | None = (
        None  # OpenAI's name of them
    )
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # there is one tier
    thread: ThreadCreate | ThreadContinue | None = None

    @property
    def named_stops(self) -> list[str]:
        """Stop strings from the field `stop`, which is OpenAI's name of `stop_sequences`."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def stops(self) -> list[str]:
        return self.stop_sequences or self.named_stops

    def check(self) -> None:
        super().check()
        if self.stop_sequences and self.stop and self.stops != self.named_stops:
            raise InvalidRequest("stop is OpenAI's name of stop_sequences; give one of them", param="stop")
        if isinstance(self.thread, ThreadContinue):
            raise ThreadNotFound(self.thread.previous_message_id)
        if isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens >= self.max_tokens:
            raise InvalidRequest(
                f"thinking.budget_tokens {self.thinking.budget_tokens} must be less than max_tokens {self.max_tokens}",
                param="thinking.budget_tokens",
            )


# Field: the values that ask for nothing. Null always asks for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "compaction": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "speed": ("standard",),
    "fallbacks": ([],),
    "inference_geo": (),
    "diagnostics": (),
    "user_profile_id": (),
}
# What may as well be left undone if the client is told.
_MAY_BE_IGNORED = frozenset(_REFUSED) - {"mcp_servers", "container", "compaction"}


class _AnyTool(Struct):
    type: Any = None


class _AnyTools(Struct):
    tools: list[msgspec.Raw]


class _Wire(Wire[T]):
    """Request decoder that rejects Anthropic's built-in tools by name, before the fields of other tools are checked."""

    def decode(self, body: bytes, ignored: list[str] | None = None) -> T:
        try:
            return super().decode(body, ignored)
        except InvalidRequest as error:
            if error.param is None or not error.param.startswith("tools["):
                raise
            for index, kind in enumerate(_kinds_of_tools(body)):
                if kind not in (None, "custom"):
                    raise InvalidRequest(
                        f"tools[{index}]: tools of type {clip(kind)} are not supported by this server, only custom ones",
                        param=f"tools[{index}].type",
                    ) from None
            raise


def _kinds_of_tools(body: bytes) -> Iterator[Any]:
    """Yield the `type` of each tool in the request body `body`. Stop at malformed JSON."""
    with suppress(msgspec.MsgspecError, RecursionError):
        for tool in msgspec.json.decode(body, type=_AnyTools).tools:
            kind = None
            with suppress(msgspec.ValidationError):
                kind = msgspec.json.decode(tool, type=_AnyTool).type
            yield kind


MESSAGES: Wire[MessagesRequest] = _Wire(MessagesRequest, _REFUSED, _MAY_BE_IGNORED)
COUNT: Wire[CountRequest] = _Wire(CountRequest, _REFUSED, _MAY_BE_IGNORED)
