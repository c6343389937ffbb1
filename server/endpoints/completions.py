"""POST /v1/completions: one or several prompts, as text or ids, and OpenAI's text completion shape around the answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server import schema
from server.generate.constraints import forms_of
from server.generate.preprocess import completion_ids
from server.generate.start import generation_of
from server.http.body import read_request
from server.http.middleware import arrival_s
from server.openai.answer import answer, answer_id
from server.openai.completion_shape import DEFAULT_MAX_TOKENS, SHAPE
from server.service import Service


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    wire = await read_request(http, schema.COMPLETION, service.config)
    served.check_name(wire.model)
    prompts = await completion_ids(served, service.offload, wire)
    generation = generation_of(
        service.config,
        served,
        wire,
        prompts,
        id=answer_id(http, SHAPE),
        arrival_s=arrival_s(http.scope),
        continues_prompt=True,
        max_tokens=wire.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
        forms=await forms_of(served, wire),
    )
    await generation.prepare(service.offload)
    return await answer(service, served, http, wire, generation, SHAPE)
