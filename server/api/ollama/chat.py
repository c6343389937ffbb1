"""Handlers of POST /api/chat and /api/generate, streamed as JSON lines."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from runtime.api import Output, TokenStream
from server.api.ollama import api_types, request_types
from server.api.ollama.frames import ChatShape, GenerateShape, LineFrames, OllamaErrors, Shape, whole
from server.api.ollama.models import named
from server.api.ollama.prepare import CHAT_NAMES, GENERATE_NAMES, Prepared, of_chat, of_generate
from server.api.route import GENERATION_REFUSALS, JSON, ErrorsBelow, route
from server.api.service import Service
from server.generate.collect import collect
from server.generate.start import start
from server.generate.timings import Timings
from server.generate.transcript import Transcript
from server.http.answers import json_response
from server.http.body import read_request
from server.http.call import Call, call_of, note_ignored, off_loop
from server.http.errors import FieldNames, InvalidRequest
from server.http.sse import JsonLineStream
from server.http.watch import ClientWatch
from server.models.model import LoadedModel

LINES = "application/x-ndjson"

ERRORS = ErrorsBelow("/api", OllamaErrors())


@route(
    "POST", "/api/chat", "ollamaChat", "Ollama",
    "Answer a conversation, as Ollama has it: as JSON lines unless `stream` is false",
    {JSON: api_types.OllamaAnswer, LINES: api_types.OllamaAnswer}, request_types.OllamaChatRequest, GENERATION_REFUSALS,
    api_types.OllamaError,
)  # fmt: skip
async def chat(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.CHAT, service.config, from_any_program=True)
    loaded = await named(call_of(http), loaded, given.model, to_chat=bool(given.messages))
    if not given.messages:
        return await _load(call_of(http), loaded, given, ChatShape())
    with CHAT_NAMES.spoken():
        prepared = await off_loop(http, lambda: of_chat(given, loaded))
    return await _answer(service, loaded, http, given, prepared, ChatShape(), CHAT_NAMES)


@route(
    "POST", "/api/generate", "ollamaGenerate", "Ollama",
    "Answer a prompt, as Ollama has it: as JSON lines unless `stream` is false",
    {JSON: api_types.OllamaAnswer, LINES: api_types.OllamaAnswer}, request_types.OllamaGenerateRequest,
    GENERATION_REFUSALS, api_types.OllamaError,
)  # fmt: skip
async def generate(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.GENERATE, service.config, from_any_program=True)
    loaded = await named(call_of(http), loaded, given.model)
    if not given.prompt and not given.suffix:
        return await _load(call_of(http), loaded, given, GenerateShape())
    prepared = of_generate(given, loaded)
    return await _answer(service, loaded, http, given, prepared, GenerateShape(), GENERATE_NAMES)


async def _load(call: Call, loaded: LoadedModel, given: request_types.OllamaRequest, shape: Shape) -> ASGIApp:
    """Respond to a request without a prompt. Loading the model needs no action; unloading is rejected."""
    if given.unloads:
        raise InvalidRequest(
            "models cannot be unloaded on request; the server unloads one when another needs its memory",
            param="keep_alive",
        )
    await loaded.enter(call)
    answer = shape.piece(given.model, "")
    answer.done, answer.done_reason = True, "load"
    return json_response(answer)


async def _answer(
    service: Service,
    loaded: LoadedModel,
    http: Request,
    given: request_types.OllamaRequest,
    prepared: Prepared,
    shape: Shape,
    names: FieldNames,
) -> ASGIApp:
    id = call_of(http).id
    timings = Timings(call_of(http).arrival_s)
    with names.spoken():
        generation, unread = await start(service.config, call_of(http), loaded, prepared.request, id=f"ollama-{id}")
    ignored = [*prepared.ignored, *map(names.name_of, unread)]
    if prepared.wants_thinking and not generation.reasons:
        ignored.append("think")
    note_ignored(http, list(dict.fromkeys(ignored)), service.config)

    def open_stream() -> TokenStream:
        timings.begin()
        return generation.open()

    if given.streams:
        return JsonLineStream(open_stream, LineFrames(given.model, id, shape, generation, timings))
    transcript, choice = Transcript(), generation.choices[0]

    def feed(output: Output) -> None:
        timings.note()
        transcript.add(choice.events(output))

    timings.begin()
    await collect(generation, ClientWatch(http.receive), feed)
    return json_response(whole(given.model, shape, generation, transcript, timings))
