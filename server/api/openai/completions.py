"""Handler of POST /v1/completions: answers one or more prompts, each a text or a list of token ids."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.openai import api_types, request_types, requests
from server.api.openai.frames import answer
from server.api.openai.shapes import COMPLETION
from server.api.route import EVENTS, GENERATION_REFUSALS, JSON, route
from server.api.service import Service
from server.http.body import read_as
from server.http.call import call_of
from server.models import lookup


@route(
    "POST", "/v1/completions", "createCompletion", "Generation",
    "Continue one or several prompts; with `stream`, as server-sent events",
    {JSON: api_types.TextCompletion, EVENTS: api_types.TextCompletionChunk}, request_types.CompletionRequest,
    GENERATION_REFUSALS,
)  # fmt: skip
async def create(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given, request = await read_as(http, request_types.COMPLETION, requests.of_completion, service.config)
    return await answer(
        service, await lookup.named(call_of(http), loaded, given.model), http, given, request, COMPLETION
    )
