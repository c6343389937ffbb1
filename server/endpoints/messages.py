"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the core of chats."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.anthropic import wire
from server.anthropic.content import blocks, message, stop, usage
from server.anthropic.events import MessageFrames
from server.anthropic.prepare import Asked, asked, in_the_clients_name, in_the_clients_words
from server.generate.collect import collect_transcripts
from server.generate.conversation import chat_ids
from server.generate.start import chat_generation
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
    wish = await _asked(service, served, request)
    id = f"msg_{request_id(http.scope)}"
    with in_the_clients_words():
        # As Anthropic has it, max_tokens may be more than the context has room for.
        generation, unheard = await chat_generation(
            service.config,
            service.offload,
            served,
            wish.chat,
            id=id,
            arrival_s=arrival_s(http.scope),
            default_max_tokens=request.max_tokens,
        )
    ignored = [*wish.ignored, *map(in_the_clients_name, unheard)]
    if wish.wants_thinking and not generation.reasons:
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
            shows_thinking=wish.shows_thinking,
        )
        return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval, done=b"")
    said = await collect_transcripts(generation, ClientWatch(http.receive))
    content = blocks(said[0], shows_thinking=wish.shows_thinking)
    stopped = stop(generation.choices[0], context_was_short=context_was_short)
    return json_response(message(id, served.name, content, stopped, usage(generation)))


async def count_tokens(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    request = await read_request(http, wire.COUNT, service.config)
    served.check_name(request.model)
    wish = await _asked(service, served, request)
    note_ignored(http, wish.ignored, service.config)
    with in_the_clients_words():
        ids = await chat_ids(served, service.offload, wish.chat)
    return json_response({"input_tokens": len(ids)})


async def _asked(service: Service, served: LoadedModel, request: wire.PromptRequest) -> Asked:
    num_chars = CHARS_PER_MESSAGE * len(request.messages)
    return await service.offload.run(num_chars, lambda: asked(request, served.chat_template))
