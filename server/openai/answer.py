"""The answer of OpenAI's chat and completion routes, streamed and whole: who relays the engine's output, and in which frames.

How a choice looks is the route's ResponseShape."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from server.generate.collect import collect_transcripts
from server.generate.generation import Generation
from server.http.body import json_response
from server.http.sse import ClientWatch, EventStream
from server.loaded.model import LoadedModel
from server.openai.frames import ChunkFrames, Envelope, ResponseShape
from server.openai.wire import GenerationRequest
from server.routes.service import Service


async def answer(
    service: Service,
    loaded: LoadedModel,
    http: HttpRequest,
    wire: GenerationRequest,
    generation: Generation,
    shape: ResponseShape,
    *,
    id: str,
) -> ASGIApp:
    """`generation`: what `wire` asks for. `id`: of the answer.

    Raises ApiError, and ClientLeft for a whole answer nobody waits for any more."""
    envelope = Envelope(id, int(time.time()), loaded.name, loaded.fingerprint, shape)
    if wire.stream:
        return _stream(service, generation, envelope, wire)
    transcript = await collect_transcripts(generation, ClientWatch(http.receive))
    return await service.offload.run(
        generation.rendering_chars, lambda: json_response(envelope.body(generation, transcript))
    )


def _stream(service: Service, generation: Generation, envelope: Envelope, wire: GenerationRequest) -> ASGIApp:
    options = wire.stream_options
    frames = ChunkFrames(
        envelope,
        generation,
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )
    return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval)
