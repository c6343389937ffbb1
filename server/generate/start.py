"""From what a client wants generated to a Generation that can be opened: prompts as ids, parameters checked against the model,
one engine request for each sequence.

Whichever API it came by, a request passes here. Knows no HTTP and no frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from runtime import api
from server.config import ServerConfig
from server.errors import InvalidRequest
from server.generate.bad_words import forbid
from server.generate.beams import BeamParams
from server.generate.constraints import forms_of
from server.generate.conversation import chat_prompt
from server.generate.generation import Generation, TextOptions
from server.generate.logprobs import Echo
from server.generate.preprocess import echoed, truncated
from server.generate.sampling import for_choice, resolve_max_tokens, sampling_params
from server.loaded.chat_format import Reading
from server.loaded.model import LoadedModel
from server.offload import Offload
from server.schema import ChatRequest, GenerationRequest

logger = logging.getLogger("oneloop.http")


async def chat_generation(
    config: ServerConfig,
    offload: Offload,
    served: LoadedModel,
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
    prompt = await chat_prompt(served, offload, wire)
    # The newer name wins; `schema` has refused two different values.
    wanted = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    generation = generation_of(
        config,
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
    await generation.prepare(offload)
    return generation, prompt.ignored


def generation_of(
    config: ServerConfig,
    served: LoadedModel,
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
    check_num_sequences(len(prompts), width, config.max_queue, "best_of" if wire.best_of else "n")
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


def check_num_sequences(num_prompts: int, width: int, max_queue: int, field: str) -> None:
    """`field` asks for `width` sequences a prompt. Raises InvalidRequest where not even an empty queue would take them all:
    waiting would not help."""
    if num_prompts * width > max_queue:
        raise InvalidRequest(
            f"{num_prompts} prompts with {field}={width} are {num_prompts * width} sequences; this server queues at most "
            f"{max_queue}",
            param=field if width > 1 else "prompt",
        )
