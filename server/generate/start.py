"""From what a client wants generated to a Generation that can be opened: prompts as ids, parameters checked against the model,
one engine request for each sequence.

Whichever API it came by, a request passes here. Knows no HTTP and no frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from runtime import api
from server.config.server_config import ServerConfig
from server.generate.allowed_ids import allowed_token_ids
from server.generate.beams import BeamParams
from server.generate.conversation import chat_prompt, check_template
from server.generate.generation import Generation, TextOptions
from server.generate.logprobs import Echo
from server.generate.long_prompt import all_prepared
from server.generate.matchers import matchers_for
from server.generate.preprocess import (
    TRUNCATE,
    echoed,
    embeds_ids,
    infill_ids,
    media_ids,
    predicted_ids,
    prompt_ids,
    truncated,
)
from server.generate.request import Chat, GenerateRequest, Infill
from server.generate.sampling import sampling_params
from server.generate.terms import Terms
from server.http.call import CALLER, CURRENT_ID, TRACE_HEADERS, Arrival
from server.http.errors import Field, InvalidRequest
from server.http.offload import Offload
from server.models.chat_format import OutputParser
from server.models.model import LoadedModel

logger = logging.getLogger("oneloop.http")

PREDICTION = Field("prediction")
MADE_AT_ONCE = 32  # requests, some tenths of a millisecond


async def start(
    config: ServerConfig, offload: Offload, loaded: LoadedModel, request: GenerateRequest, *, id: str, arrival: Arrival
) -> tuple[Generation, tuple[Field, ...]]:
    """A Generation that is not opened yet, and the fields of `request` that mean nothing to this model's template or engine, which
    the client has to learn. Of each choice, Outputs become text by `Choice.feed` or events by `Choice.events`, with their
    log-probabilities by `take_logprobs`; `finish_reason` is set with the last of them.

    Raises ApiError, in whose message and `param` fields of GenerateRequest are Fields."""
    _check(config, loaded, request)
    terms = Terms.of(
        config, arrival, priority=request.priority, timeout_s=request.timeout_s, cache_salt=request.cache_salt
    )
    if isinstance(request.prompt, Chat) and not loaded.is_resident:
        check_template(loaded)  # before another model is unloaded for it
    await loaded.enter_to_generate(terms.deadline_s)
    fits = request.truncation is None
    output_parser: OutputParser | None = None
    ignored: tuple[Field, ...] = ()
    continues = True
    media: tuple[api.MediaItem, ...] = ()
    if isinstance(request.prompt, Chat):
        prompt = await chat_prompt(loaded, offload, request.prompt, show_reasoning=request.shown.reasoning, fits=fits)
        prompts, media, output_parser, ignored = [prompt.ids], prompt.media, prompt.output_parser, prompt.ignored
        continues = request.prompt.continue_final_message
    elif isinstance(request.prompt, Infill):
        prompts = await infill_ids(loaded, offload, request.prompt, fits=fits)
        request = _ending_with_the_middle(loaded, request)
    elif request.prompt.embeds is not None:
        whole, media = await embeds_ids(loaded, offload, request.prompt.embeds, config.max_media_size)
        prompts = [whole]
    elif request.prompt.media:
        whole, media = await media_ids(loaded, offload, request.prompt, fits=fits)
        prompts = [whole]
    else:
        prompts = await prompt_ids(loaded, offload, request.prompt, fits=fits)
    prediction: Sequence[int] = ()
    if request.prediction is not None:
        if loaded.engine.model.reads_predictions and request.speculative:
            prediction = await predicted_ids(loaded, offload, request.prediction, PREDICTION)
        else:
            ignored = (*ignored, PREDICTION)
    matchers = await matchers_for(loaded, request, output_parser)
    beams = _beams(request, loaded.engine.model)
    allowed = await allowed_token_ids(request, offload, loaded.engine.model.vocab_size)
    requests: list[api.Request] = []
    echoes: list[Echo] = []
    adapter = loaded.adapter_for(media) if media else loaded.adapter
    fitted = [_fitted(loaded, request, given) for given in prompts]
    if media and len(fitted[0]) < len(prompts[0]):
        raise InvalidRequest(TRUNCATE, " may not cut a prompt that has more than text", param=TRUNCATE)
    prepared = await all_prepared(loaded, offload, fitted, terms.cache_salt, media, adapter)
    for number, (given, ids, made) in enumerate(zip(prompts, fitted, prepared, strict=True)):
        if number:
            await asyncio.sleep(0)  # parameters are checked for each prompt
        if request.shown.echo:
            echoes.append(echoed(loaded.tokenizer, request, number, ids, is_cut=len(ids) < len(given)))
        choices = sampling_params(request, len(ids), matchers.factories, loaded.defaults, loaded.engine.model, allowed)
        first = len(requests)
        requests += (
            api.Request(
                id=f"{id}-{first + choice}",
                prompt_ids=ids,
                params=params,
                priority=terms.priority,
                cache_salt=terms.cache_salt,
                arrival_s=arrival.time_s,
                caller=CALLER.get(),
                parent_id=CURRENT_ID.get(),
                trace_headers=TRACE_HEADERS.get(),
                deadline_s=terms.deadline_s,
                prepared=made,
                speculative=request.speculative,
                prediction=prediction,
                adapter=adapter,
                media=media,
            )
            for choice, params in enumerate(choices)
        )
    options = _text_options(
        request, continues_prompt=continues, output_parser=output_parser, constrained_by=matchers.param
    )
    if len(requests) > MADE_AT_ONCE:
        await asyncio.sleep(0)
    generation = Generation(loaded, requests, len(prompts), request.n, options, echoes, beams)
    if len(requests) > MADE_AT_ONCE:
        await asyncio.sleep(0)  # next the engine takes them, all at once
    if config.log_requests:
        logger.info(
            "%s: %d sequences, %d prompt tokens, %s",
            id,
            len(requests),
            generation.num_prompt_tokens,
            requests[0].params,
        )
    return generation, ignored


def _ending_with_the_middle(loaded: LoadedModel, request: GenerateRequest) -> GenerateRequest:
    """`request`, whose answers end where the model goes on with another file, or with what surrounds the middle."""
    infill, sampling = loaded.infill, request.sampling
    assert infill is not None, "there are ids"
    stop_token_ids = [*(sampling.stop_token_ids or ()), *sorted(infill.stop_ids)]
    return replace(request, sampling=replace(sampling, stop_token_ids=stop_token_ids))


def _check(config: ServerConfig, loaded: LoadedModel, request: GenerateRequest) -> None:
    """Raises InvalidRequest where not even an empty queue would take all sequences, so that waiting would not help."""
    num_prompts, width = request.num_prompts, request.num_candidates
    limit = min(config.max_queue, config.max_num_seqs_per_key or config.max_queue)
    if num_prompts * width > limit:
        field = request.candidates_field
        raise InvalidRequest(
            f"{num_prompts} prompts with ", field, f"={width} are {num_prompts * width} sequences; ",
            f"this server takes at most {limit}",
            param=field if width > 1 else request.prompt_field,
        )  # fmt: skip


def _fitted(loaded: LoadedModel, request: GenerateRequest, given: Sequence[int]) -> Sequence[int]:
    """The ids of a prompt, cut if the client wants that. Raises InvalidRequest."""
    if not given:
        field = request.prompt_field
        raise InvalidRequest(field, " is empty: there is no token to continue", param=field)
    if request.truncation is None:
        return given
    max_tokens = request.default_max_tokens if request.max_tokens is None else request.max_tokens
    return truncated(given, request.truncation, max_tokens, loaded.engine.model.max_model_len)


def _text_options(
    request: GenerateRequest, *, continues_prompt: bool, output_parser: OutputParser | None, constrained_by: str | None
) -> TextOptions:
    shown = request.shown
    return TextOptions(
        stop=tuple(shown.stop),
        include_stop=shown.include_stop,
        skip_special_tokens=shown.skip_special_tokens,
        min_tokens=request.sampling.min_tokens or 0,
        continues_prompt=continues_prompt,
        token_ids=shown.token_ids,
        logprobs=shown.logprobs,
        prompt_logprobs=shown.prompt_logprobs,
        tokens_as_ids=shown.tokens_as_ids,
        output_parser=output_parser,
        constrained_by=constrained_by,
    )


def _beams(request: GenerateRequest, model: api.ModelInfo) -> BeamParams | None:
    """Raises InvalidRequest where the vocabulary has not as many tokens."""
    if request.beams is None:
        return None
    width = request.num_candidates
    num_ends = len(model.eos_token_ids) + len(request.sampling.stop_token_ids or ())
    if width + num_ends > model.vocab_size:
        raise InvalidRequest(
            f"{width} beams are too many for a vocabulary of {model.vocab_size}", param=request.candidates_field
        )
    return BeamParams(width, request.n, request.beams.length_penalty, request.beams.early_stopping)
