"""POST /v1/completions: one or several prompts, as text or ids, and OpenAI's text completion shape around the answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.generate.start import start
from server.http.body import read_request
from server.http.middleware import arrival_s, request_id
from server.openai import requests, wire
from server.openai.answer import answer
from server.openai.completion_shape import SHAPE
from server.service import Service


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    given = await read_request(http, wire.COMPLETION, service.config)
    served.check_name(given.model)
    id = SHAPE.id_prefix + request_id(http.scope)
    generation, _ = await start(
        service.config,
        service.offload,
        served,
        requests.of_completion(given),
        id=id,
        arrival_s=arrival_s(http.scope),
    )
    return await answer(service, served, http, given, generation, SHAPE, id=id)
