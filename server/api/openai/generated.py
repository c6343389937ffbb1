"""The answer of OpenAI's chat and completion routes, streamed and whole: who starts the engine's work and relays its output, and in
which frames.

How a choice looks is the route's ResponseShape."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from server.api.openai.frames import ChunkFrames, Envelope
from server.api.openai.request_types import GenerationRequest
from server.api.openai.shapes import ResponseShape
from server.api.service import Service
from server.generate.collect import collect_transcripts
from server.generate.request import GenerateRequest
from server.generate.start import start
from server.http.answers import json_response, long_json_response
from server.http.call import call_of, note_ignored
from server.http.sse import EventStream
from server.http.watch import ClientWatch, while_waited_for
from server.models.model import LoadedModel


async def answer(
    service: Service,
    loaded: LoadedModel,
    http: HttpRequest,
    wire: GenerationRequest,
    request: GenerateRequest,
    shape: ResponseShape,
) -> ASGIApp:
    """`request`: what `wire` asks for.

    Raises ApiError, and ClientLeft for an answer nobody waits for any more."""
    call = call_of(http)
    id = shape.id_prefix + call.id
    generation, ignored = await while_waited_for(http.receive, start(service.config, call, loaded, request, id=id))
    note_ignored(http, ignored, service.config)
    envelope = Envelope(id, int(time.time()), loaded.name, loaded.fingerprint, shape)
    if wire.stream:
        options = wire.stream_options
        frames = ChunkFrames(
            envelope,
            generation,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )
        return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval)
    transcript = await collect_transcripts(generation, ClientWatch(http.receive))
    if not generation.rendering_chars:
        return json_response(envelope.body(generation, transcript))

    def response() -> Response:
        body = envelope.body(generation, transcript)
        generation.release()
        return long_json_response(body)

    return await call_of(http).run(generation.rendering_chars, response)
