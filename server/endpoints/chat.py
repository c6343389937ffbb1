"""POST /v1/chat/completions: messages through the chat template to ids, and OpenAI's chat shape around the answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server import schema
from server.generate.start import chat_generation
from server.http.body import note_ignored, read_request
from server.http.middleware import arrival_s
from server.openai.answer import answer, answer_id
from server.openai.chat_shape import SHAPE
from server.service import Service


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    wire = await read_request(http, schema.CHAT, service.config)
    served.check_name(wire.model)
    id = answer_id(http, SHAPE)
    generation, ignored = await chat_generation(
        service.config, service.offload, served, wire, id=id, arrival_s=arrival_s(http.scope)
    )
    note_ignored(http, ignored, service.config)
    return await answer(service, served, http, wire, generation, SHAPE)
