"""POST /v1/chat/completions: messages through the chat template to ids, and OpenAI's chat shape around the answer."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from server.generate.start import start
from server.http.body import body_cost, note_ignored, read_request
from server.http.middleware import arrival, request_id
from server.http.sse import while_waited_for
from server.openai import api_types, requests, wire
from server.openai.answer import answer
from server.openai.chat_shape import SHAPE, ChatShape
from server.routes.route import EVENTS, GENERATION_REFUSALS, JSON, Operation, route
from server.routes.service import Service


@route(
    "POST",
    "/v1/chat/completions",
    Operation(
        "createChatCompletion", "Generation", "Answer a conversation; with `stream`, as server-sent events",
        {JSON: api_types.ChatCompletion, EVENTS: api_types.ChatCompletionChunk}, wire.ChatRequest, GENERATION_REFUSALS,
    ),
)  # fmt: skip
async def create(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, wire.CHAT, service.config, service.offload)
    loaded = await loaded.named(given.model)
    id = SHAPE.id_prefix + request_id(http.scope)
    request = await service.offload.run(body_cost(http), partial(requests.of_chat, given))
    generation, ignored = await while_waited_for(
        http.receive, start(service.config, service.offload, loaded, request, id=id, arrival=arrival(http.scope))
    )
    if ignored:
        note_ignored(http, ignored, service.config)
    custom = wire.custom_names(given.tools)
    return await answer(service, loaded, http, given, generation, ChatShape(custom) if custom else SHAPE, id=id)
