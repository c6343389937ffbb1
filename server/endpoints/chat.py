"""POST /v1/chat/completions: messages through the chat template to ids, and OpenAI's chat shape around the answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.generate.start import start
from server.http.body import note_ignored, read_request
from server.http.middleware import arrival_s, request_id
from server.openai import requests, wire
from server.openai.answer import answer
from server.openai.chat_shape import SHAPE
from server.service import Service


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    given = await read_request(http, wire.CHAT, service.config)
    served.check_name(given.model)
    id = SHAPE.id_prefix + request_id(http.scope)
    generation, ignored = await start(
        service.config,
        service.offload,
        served,
        requests.of_chat(given),
        id=id,
        arrival_s=arrival_s(http.scope),
    )
    if ignored:
        note_ignored(http, ignored, service.config)
    return await answer(service, served, http, given, generation, SHAPE, id=id)
