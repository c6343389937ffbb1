"""From prompt ids to the answer: the one path of chat and completions, streamed and whole.

It turns prompts into engine requests, n for each, and picks who relays what the engine says: an EventStream or, for a whole
answer, a loop that also notices the client leaving. How a choice looks is the caller's Shape."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime import api
from server import admission
from server.config import ServerConfig
from server.errors import InvalidRequest, Unavailable
from server.frames import ChunkFrames, Envelope, Shape, json_response
from server.generation import Generation, TextOptions
from server.intake import truncated
from server.lifecycle import RETRY_AFTER_DRAIN_S, Served
from server.middleware import arrival_s, request_id
from server.sampling import for_choice, resolve_max_tokens, sampling_params
from server.schema import GenerationRequest
from server.service import Service
from server.sse import ClientLeft, ClientWatch, EventStream

logger = logging.getLogger("oneloop.http")


async def answer(
    service: Service,
    served: Served,
    http: HttpRequest,
    wire: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    shape: Shape,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    param: str,
) -> ASGIApp:
    """`max_tokens`: as the client wants it; `param`: the field the prompts came from, for complaints.

    Raises ApiError, and ClientLeft for a whole answer nobody waits for any more."""
    envelope = Envelope(
        shape.id_prefix + request_id(http.scope), int(time.time()), served.name, served.fingerprint, shape
    )
    generation = generation_of(
        service.config,
        served,
        wire,
        prompts,
        id=envelope.id,
        arrival_s=arrival_s(http.scope),
        continues_prompt=shape.continues_prompt,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        param=param,
    )
    if service.config.log_requests:
        logger.info(
            "%s: %d sequences, %d prompt tokens, %s",
            envelope.id,
            len(generation.requests),
            generation.num_prompt_tokens,
            generation.requests[0].params,
        )
    if wire.stream:
        return _stream(service, generation, envelope, wire)
    return await _whole(http, generation, envelope)


def generation_of(
    config: ServerConfig,
    served: Served,
    wire: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    *,
    id: str,
    arrival_s: float,
    continues_prompt: bool,
    max_tokens: int | None,
    default_max_tokens: int | None,
    param: str,
) -> Generation:
    """What `wire` asks of the engine for `prompts`, not yet asked: nothing here knows HTTP. See `answer` for the rest.

    Raises ApiError."""
    n = wire.n or 1
    admission.check_num_sequences(len(prompts), n, config.max_queue)
    if wire.priority and config.scheduling_policy != "priority":
        raise InvalidRequest("priority needs a server started with --scheduling-policy priority", param="priority")
    requests: list[api.Request] = []
    for prompt_ids in prompts:
        if not prompt_ids:
            raise InvalidRequest(f"{param} is empty: there is no token to continue", param=param)
        prompt_ids = truncated(prompt_ids, wire, max_tokens or default_max_tokens, served.engine.model.max_model_len)
        limit = resolve_max_tokens(max_tokens, default_max_tokens, len(prompt_ids), served.engine.model, param)
        params = sampling_params(wire, limit, served.defaults, served.engine.model)
        for choice in range(n):
            requests.append(
                api.Request(
                    id=f"{id}-{len(requests)}",
                    prompt_ids=prompt_ids,
                    params=for_choice(params, choice),
                    priority=wire.priority or 0,
                    cache_salt=wire.cache_salt,
                    arrival_s=arrival_s,
                )
            )
    return Generation(served, requests, n, TextOptions.of(wire, continues_prompt=continues_prompt))


def _stream(service: Service, generation: Generation, envelope: Envelope, wire: GenerationRequest) -> ASGIApp:
    options = wire.stream_options
    frames = ChunkFrames(
        envelope,
        generation,
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )
    return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval)


async def _whole(http: HttpRequest, generation: Generation, envelope: Envelope) -> Response:
    texts: list[list[str]] = [[] for _ in generation.requests]
    async with generation.open() as stream, ClientWatch(http.receive) as watch:
        async for outputs in stream:
            for output in outputs:
                texts[output.index].append(generation.choices[output.index].feed(output))
    if watch.gone:
        raise ClientLeft
    if generation.aborted:
        # Half an answer without a word about it would pass for a whole one.
        raise Unavailable("The server shut down before the answer was complete", retry_after_s=RETRY_AFTER_DRAIN_S)
    return json_response(envelope.body(generation, ["".join(parts) for parts in texts]))
