"""Handlers of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.anthropic import api_types, request_types
from server.api.anthropic.api_types import AnthropicMessage, Stopped, TextContent, ThinkingContent, ToolUseContent
from server.api.anthropic.errors import AnthropicErrors
from server.api.anthropic.events import MessageFrames
from server.api.anthropic.history import tool_use_id
from server.api.anthropic.prepare import NAMES, PreparedMessages, generate_request, prepare
from server.api.frames import encoded
from server.api.route import BODY_REFUSALS, EVENTS, GENERATION_REFUSALS, JSON, ErrorsBelow, route
from server.api.service import Service
from server.generate.collect import collect_transcripts
from server.generate.encode import chat_ids
from server.generate.start import start
from server.generate.transcript import Part, TranscriptCall
from server.http.answers import json_response
from server.http.body import read_request
from server.http.call import call_of, note_ignored, off_loop
from server.http.sse import EventStream
from server.http.watch import ClientWatch, while_waited_for
from server.models import lookup
from server.models.model import LoadedModel
from server.text.events import Reasoning, Text

ERRORS = ErrorsBelow("/v1/messages", AnthropicErrors())


@route(
    "POST", "/v1/messages", "createMessage", "Generation",
    "Answer a conversation, as Anthropic has it; with `stream`, as server-sent events",
    {JSON: api_types.AnthropicMessage, EVENTS: api_types.MessageEvent}, request_types.MessagesRequest,
    GENERATION_REFUSALS, api_types.AnthropicError,
)  # fmt: skip
async def create(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    request = await read_request(http, request_types.MESSAGES, service.config)
    loaded = await lookup.named(call_of(http), loaded, request.model, to_chat=True)
    prepared = await _prepare_messages(loaded, http, request)
    id = f"msg_{call_of(http).id}"
    with NAMES.spoken():
        generation, unread = await while_waited_for(
            http.receive,
            start(
                service.config, call_of(http), loaded, generate_request(request, prepared), id=id,
            ),
        )  # fmt: skip
    ignored = [*prepared.ignored, *map(NAMES.name_of, unread)]
    if prepared.wants_thinking and not generation.reasons:
        ignored.append("thinking")
    note_ignored(http, ignored, service.config)
    context_was_short = generation.requests[0].sampling.max_tokens < request.max_tokens
    if request.stream:
        frames = MessageFrames(
            id, loaded.name, call_of(http).id, generation,
            context_was_short=context_was_short, shows_thinking=prepared.shows_thinking,
        )  # fmt: skip
        return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval, done=b"")
    (transcript,) = await collect_transcripts(generation, ClientWatch(http.receive))
    blocks = [_block(part, prepared.shows_thinking) for part in transcript.parts]
    content = [block for block in blocks if block is not None]
    stopped = Stopped.of(generation.choices[0], context_was_short=context_was_short)
    return json_response(AnthropicMessage.of(id, loaded.name, content, stopped, generation))


def _block(part: Part, shows_thinking: bool) -> api_types.Content | None:
    match part:
        case Text(text):
            return TextContent(text) if text else None
        case Reasoning(text):
            return ThinkingContent(text if shows_thinking else "")
        case TranscriptCall(id, name, arguments):
            return ToolUseContent(tool_use_id(id), name, encoded(arguments))  # checked as it was written


@route(
    "POST", "/v1/messages/count_tokens", "countMessageTokens", "Tokens",
    "How many tokens a conversation's prompt has, as Anthropic has it", {JSON: api_types.InputTokens},
    request_types.CountRequest, BODY_REFUSALS, api_types.AnthropicError,
)  # fmt: skip
async def count_tokens(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    request = await read_request(http, request_types.COUNT, service.config)
    loaded = await lookup.named(call_of(http), loaded, request.model, to_chat=True)
    prepared = await _prepare_messages(loaded, http, request)
    note_ignored(http, prepared.ignored, service.config)
    with NAMES.spoken():
        ids = await while_waited_for(http.receive, chat_ids(loaded, call_of(http), prepared.chat))
    return json_response(api_types.InputTokens(len(ids)))


async def _prepare_messages(
    loaded: LoadedModel, http: Request, request: request_types.PromptRequest
) -> PreparedMessages:
    return await off_loop(http, partial(prepare, request, loaded.chat_template))
