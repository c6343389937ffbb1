"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the core of chats."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.anthropic import wire
from server.anthropic.content import blocks, message, stop, usage
from server.anthropic.events import MessageFrames
from server.anthropic.prepare import NAMES, Prepared, generate_request, prepare
from server.generate.collect import collect_transcripts
from server.generate.conversation import chat_ids
from server.generate.start import start
from server.http.body import json_response, note_ignored, read_request
from server.http.middleware import arrival_s, request_id
from server.http.sse import ClientWatch, EventStream
from server.loaded.model import LoadedModel
from server.service import Service

CHARS_PER_MESSAGE = 20  # of text that would take as long to tokenise as a message takes to become a chat's


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    request = await read_request(http, wire.MESSAGES, service.config)
    served.check_name(request.model)
    prepared = await _prepared(service, served, request)
    id = f"msg_{request_id(http.scope)}"
    with NAMES.spoken():
        generation, unread = await start(
            service.config,
            service.offload,
            served,
            generate_request(request, prepared),
            id=id,
            arrival_s=arrival_s(http.scope),
        )
    ignored = [*prepared.ignored, *map(NAMES.name_of, unread)]
    if prepared.wants_thinking and not generation.reasons:
        ignored.append("thinking")
    note_ignored(http, ignored, service.config)
    context_was_short = generation.requests[0].sampling.max_tokens < request.max_tokens
    if request.stream:
        frames = MessageFrames(
            id,
            served.name,
            request_id(http.scope),
            generation,
            context_was_short=context_was_short,
            shows_thinking=prepared.shows_thinking,
        )
        return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval, done=b"")
    (transcript,) = await collect_transcripts(generation, ClientWatch(http.receive))
    content = blocks(transcript, shows_thinking=prepared.shows_thinking)
    stopped = stop(generation.choices[0], context_was_short=context_was_short)
    return json_response(message(id, served.name, content, stopped, usage(generation)))


async def count_tokens(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    request = await read_request(http, wire.COUNT, service.config)
    served.check_name(request.model)
    prepared = await _prepared(service, served, request)
    note_ignored(http, prepared.ignored, service.config)
    with NAMES.spoken():
        ids = await chat_ids(served, service.offload, prepared.chat)
    return json_response({"input_tokens": len(ids)})


async def _prepared(service: Service, served: LoadedModel, request: wire.PromptRequest) -> Prepared:
    num_chars = CHARS_PER_MESSAGE * len(request.messages)
    return await service.offload.run(num_chars, lambda: prepare(request, served.chat_template))
