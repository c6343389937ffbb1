"""POST /v1/completions: one or several prompts, as text or ids, and OpenAI's text completion shape around the answers."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from server.generate.start import start
from server.http.body import body_cost, read_request
from server.http.middleware import arrival, request_id
from server.http.sse import while_waited_for
from server.openai import api_types, requests, wire
from server.openai.answer import answer
from server.openai.completion_shape import SHAPE
from server.routes.route import EVENTS, GENERATION_REFUSALS, JSON, Operation, route
from server.routes.service import Service


@route(
    "POST",
    "/v1/completions",
    Operation(
        "createCompletion", "Generation", "Continue one or several prompts; with `stream`, as server-sent events",
        {JSON: api_types.TextCompletion, EVENTS: api_types.TextCompletionChunk}, wire.CompletionRequest, GENERATION_REFUSALS,
    ),
)  # fmt: skip
async def create(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, wire.COMPLETION, service.config, service.offload)
    loaded = await loaded.named(given.model)
    id = SHAPE.id_prefix + request_id(http.scope)
    request = await service.offload.run(body_cost(http), partial(requests.of_completion, given))
    generation, _ = await while_waited_for(
        http.receive, start(service.config, service.offload, loaded, request, id=id, arrival=arrival(http.scope))
    )
    return await answer(service, loaded, http, given, generation, SHAPE, id=id)
