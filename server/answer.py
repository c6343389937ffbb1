"""From prompt ids to the answer: the one path of chat and completions, streamed and whole.

It turns prompts into engine requests, n for each, and picks who relays what the engine says: an EventStream or, for a whole
answer, a loop that also notices the client leaving. How a choice looks is the caller's Shape."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime import api
from server import admission
from server.bad_words import forbid
from server.beams import BeamParams
from server.chat_format import Reading
from server.config import ServerConfig
from server.conversation import chat_prompt
from server.errors import InvalidRequest, Unavailable
from server.frames import ChunkFrames, Envelope, Shape, json_response
from server.generation import Generation, TextOptions
from server.intake import echoed, truncated
from server.lifecycle import RETRY_AFTER_DRAIN_S, Served
from server.logprobs import Echo
from server.middleware import request_id
from server.sampling import for_choice, resolve_max_tokens, sampling_params
from server.schema import ChatRequest, GenerationRequest
from server.service import Service
from server.sse import ClientLeft, ClientWatch, EventStream
from server.structured.wishes import forms_of
from server.transcript import Transcript

logger = logging.getLogger("oneloop.http")


async def answer(
    service: Service,
    served: Served,
    http: HttpRequest,
    wire: GenerationRequest,
    generation: Generation,
    shape: Shape,
) -> ASGIApp:
    """`generation`: what `wire` asks for, under the id `answer_id` gives.

    Raises ApiError, and ClientLeft for a whole answer nobody waits for any more."""
    envelope = Envelope(answer_id(http, shape), int(time.time()), served.name, served.fingerprint, shape)
    if wire.stream:
        return _stream(service, generation, envelope, wire)
    said = await transcripts(http, generation)
    return await service.offload.run(generation.rendering_chars, lambda: json_response(envelope.body(generation, said)))


def answer_id(http: HttpRequest, shape: Shape) -> str:
    return shape.id_prefix + request_id(http.scope)


async def chat_generation(
    service: Service,
    served: Served,
    wire: ChatRequest,
    *,
    id: str,
    arrival_s: float,
    default_max_tokens: int | None = None,
) -> tuple[Generation, tuple[str, ...]]:
    """What a chat asks of the engine, by whichever API it came, and the fields of it that the model's template does not look
    at, of which the client has to be told. One choice's Outputs become events by `Choice.events`, with their log-probabilities
    by `take_logprobs`; `finish_reason` is set with the last of them.

    Raises ApiError; `param` is a field of ChatRequest."""
    prompt = await chat_prompt(served, service.offload, wire)
    # The newer name wins; `schema` has refused two different values.
    wanted = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    generation = generation_of(
        service.config,
        served,
        wire,
        [prompt.ids],
        id=id,
        arrival_s=arrival_s,
        continues_prompt=prompt.goes_on,
        max_tokens=wanted,
        default_max_tokens=default_max_tokens,
        param="messages",
        forms=await forms_of(served, wire, prompt.reading),
        reading=prompt.reading,
    )
    return generation, prompt.ignored


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
    forms: tuple[api.MatcherFactory, ...] = (),
    reading: Reading | None = None,
) -> Generation:
    """What `wire` asks of the engine for `prompts`, not yet asked: nothing here knows HTTP. `forms`: what holds each sequence
    to the form that was asked for. `max_tokens`: as the client wants it; `param`: the field the prompts came from, for
    complaints. `continues_prompt`: an answer goes on where the prompt ends, rather than being a new text.

    Raises ApiError."""
    n, width = wire.n or 1, wire.best_of or wire.n or 1
    admission.check_num_sequences(len(prompts), width, config.max_queue, "best_of" if wire.best_of else "n")
    if wire.priority and config.scheduling_policy != "priority":
        raise InvalidRequest("priority needs a server started with --scheduling-policy priority", param="priority")
    beams = _beams(wire, served.engine.model) if wire.use_beam_search else None
    requests: list[api.Request] = []
    echoes: list[Echo] = []
    for number, given in enumerate(prompts):
        if not given:
            raise InvalidRequest(f"{param} is empty: there is no token to continue", param=param)
        prompt_ids = truncated(
            given, wire, default_max_tokens if max_tokens is None else max_tokens, served.engine.model.max_model_len
        )
        if wire.echoes:
            echoes.append(echoed(served.tokenizer, wire, number, prompt_ids, is_cut=len(prompt_ids) < len(given)))
        limit = resolve_max_tokens(max_tokens, default_max_tokens, len(prompt_ids), served.engine.model, param)
        params = sampling_params(wire, limit, served.defaults, served.engine.model)
        matchers = (*params.matchers, *forms)
        if wire.bad_words:
            encode = partial(served.tokenizer.encode, add_special_tokens=False)
            matchers = (*matchers, forbid(wire.bad_words, encode, served.engine.model.vocab_size))
        params = replace(params, matchers=matchers)
        for choice in range(n if beams else width):
            requests.append(
                api.Request(
                    id=f"{id}-{len(requests)}",
                    prompt_ids=prompt_ids,
                    params=for_choice(params, choice, tells_prompt=choice == 0 or bool(wire.stream)),
                    priority=wire.priority or 0,
                    cache_salt=wire.cache_salt,
                    arrival_s=arrival_s,
                )
            )
    options = TextOptions.of(wire, continues_prompt=continues_prompt, reading=reading)
    generation = Generation(served, requests, len(prompts), n, options, echoes, beams)
    if config.log_requests:
        logger.info(
            "%s: %d sequences, %d prompt tokens, %s",
            id,
            len(requests),
            generation.num_prompt_tokens,
            requests[0].params,
        )
    return generation


def _beams(wire: GenerationRequest, model: api.ModelInfo) -> BeamParams:
    """Raises InvalidRequest where the vocabulary has not as many tokens."""
    width = wire.best_of or wire.n or 1
    num_ends = len(model.eos_token_ids) + len(wire.stop_token_ids or ())
    if width + num_ends > model.vocab_size:
        raise InvalidRequest(
            f"{width} beams are too many for a vocabulary of {model.vocab_size}",
            param="best_of" if wire.best_of else "n",
        )
    penalty = 1.0 if wire.length_penalty is None else wire.length_penalty
    return BeamParams(width, wire.n or 1, penalty, wire.early_stopping or False)


def _stream(service: Service, generation: Generation, envelope: Envelope, wire: GenerationRequest) -> ASGIApp:
    options = wire.stream_options
    frames = ChunkFrames(
        envelope,
        generation,
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )
    return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval)


async def transcripts(http: HttpRequest, generation: Generation) -> list[Transcript]:
    """What each choice says, once all have ended. Raises as `hear` does."""
    said = [Transcript() for _ in generation.requests]
    await hear(http, generation, lambda output: said[output.index].add(generation.choices[output.index].events(output)))
    return said


async def hear(http: HttpRequest, generation: Generation, feed: Callable[[api.Output], object]) -> None:
    """Generates, and feeds every Output to `feed`.

    Raises ApiError, and ClientLeft where nobody waits for it any more."""
    async with generation.open() as stream, ClientWatch(http.receive) as watch:
        async for outputs in stream:
            for output in outputs:
                feed(output)
    if watch.gone:
        raise ClientLeft
    if generation.aborted:
        # Half an answer without a word about it would pass for a whole one.
        raise Unavailable("The server shut down before the answer was complete", retry_after_s=RETRY_AFTER_DRAIN_S)
