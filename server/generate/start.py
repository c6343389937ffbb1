"""Start of a generation, for every API: encodes the prompts, checks parameters against the model, and creates one engine request
per sequence. Independent of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Self

from msgspec import structs

from runtime import api
from server.config.server_config import ServerConfig
from server.generate.encode import EncodedPrompts, check_template, encode_prompt
from server.generate.generation import Generation, TextOptions
from server.generate.matchers import matchers_for
from server.generate.plain_prompts import TRUNCATE, all_prepared, echoed, predicted_ids, truncated
from server.generate.request import Chat, GenerateRequest
from server.generate.sampling import allowed_token_ids, sampling_params
from server.http.call import Call
from server.http.errors import Field, InvalidRequest
from server.models.model import LoadedModel

logger = logging.getLogger("oneloop.http")

PREDICTION, PRIORITY = Field("prediction"), Field("priority")
MADE_AT_ONCE = 32  # requests, some tenths of a millisecond


class Terms(NamedTuple):
    """Values that all engine requests of one call share. `deadline_s`: by `time.monotonic()`, or None. `cache_salt`: requests
    share cached prefixes only if their salts are equal."""

    call: Call
    priority: int
    deadline_s: float | None
    cache_salt: str | None

    @classmethod
    def of(
        cls, config: ServerConfig, call: Call, *, priority: int, timeout_s: float | None, cache_salt: str | None
    ) -> Self:
        """Return the terms of `call`. `timeout_s`: the client's timeout. `cache_salt`: the client's salt, which is combined with
        the salt of the API key.

        Raises InvalidRequest if `priority` is set but the scheduling policy ignores priorities."""
        if priority and config.scheduling_policy != "priority":
            raise InvalidRequest(PRIORITY, " needs a server started with --scheduling-policy priority", param=PRIORITY)
        is_shared = call.tenant is None or config.shared_prefix_cache
        salt = cache_salt if is_shared else f"{call.tenant}/{cache_salt or ''}"
        return cls(call, priority, call.deadline_s(timeout_s), salt)

    def engine_request(
        self, id: str, prompt_ids: Sequence[int], params: api.SamplingParams | api.PoolingParams, adapter: api.Adapter | None,
        *, prepared: api.PreparedPrompt | None = None, media: tuple[api.MediaItem, ...] = (), speculative: bool = True,
        prediction: Sequence[int] = (),
    ) -> api.Request:  # fmt: skip
        """Create an engine request with these terms. Arguments: see `api.Request`."""
        return api.Request(
            id=id,
            prompt_ids=prompt_ids,
            params=params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            arrival_s=self.call.arrival_s,
            prepared=prepared,
            caller=self.call.caller,
            deadline_s=self.deadline_s,
            speculative=speculative,
            prediction=prediction,
            parent_id=self.call.id or None,
            trace_headers=self.call.trace_headers,
            adapter=adapter,
            media=media,
        )


async def start(
    config: ServerConfig, call: Call, loaded: LoadedModel, request: GenerateRequest, *, id: str
) -> tuple[Generation, tuple[Field, ...]]:
    """Prepare a generation. Return the generation, not yet opened, and the fields of `request` that this model ignores.

    For each choice, call `Choice.feed` to get text or `Choice.events` to get events, and `take_logprobs` to get
    log-probabilities. `finish_reason` is set with the last output. Raises ApiError, whose message and `param` refer to Fields of
    GenerateRequest."""
    _check(config, request)
    terms = Terms.of(
        config, call, priority=request.priority, timeout_s=request.timeout_s, cache_salt=request.cache_salt
    )
    if isinstance(request.prompt, Chat) and not loaded.is_resident:
        check_template(loaded)  # before another model is unloaded for it
    await loaded.enter_to_generate(call, terms.deadline_s)
    encoded = await encode_prompt(request.prompt, request, loaded, call, config)
    if encoded.stop_ids:
        stop_token_ids = [*(request.sampling.stop_token_ids or ()), *sorted(encoded.stop_ids)]
        request = structs.replace(request, sampling=structs.replace(request.sampling, stop_token_ids=stop_token_ids))
    ignored = encoded.ignored
    prediction: Sequence[int] = ()
    if request.prediction is not None:
        if loaded.engine.model.reads_predictions and request.speculative:
            prediction = await predicted_ids(loaded, call, request.prediction, PREDICTION)
        else:
            ignored = (*ignored, PREDICTION)
    matchers = await matchers_for(loaded, call, request, encoded.output_parser)
    _check_beams(request, loaded.engine.model)
    fitted = [_fitted(loaded, request, encoded, given) for given in encoded.prompts]
    requests = await _requests(
        loaded, request, fitted, matchers.factories, terms, id=id, media=encoded.media,
        prediction=prediction,
    )  # fmt: skip
    echoes = [
        echoed(loaded.tokenizer, request, number, ids, is_cut=len(ids) < len(given))
        for number, (given, ids) in enumerate(zip(encoded.prompts, fitted, strict=True))
        if request.shown.echo
    ]
    if len(requests) > MADE_AT_ONCE:
        await asyncio.sleep(0)
    options = _text_options(request, encoded, matchers.param)
    generation = Generation(loaded, requests, len(fitted), request.n, options, echoes, request.beams)
    if len(requests) > MADE_AT_ONCE:
        await asyncio.sleep(0)  # next the engine takes them, all at once
    if config.log_requests:
        counts = (len(requests), generation.num_prompt_tokens)
        logger.info("%s: %d sequences, %d prompt tokens, %s", id, *counts, requests[0].params)
    return generation, ignored


async def _requests(
    loaded: LoadedModel,
    request: GenerateRequest,
    prompts: Sequence[Sequence[int]],
    matchers: tuple[api.MatcherFactory, ...],
    terms: Terms,
    *,
    id: str,
    media: tuple[api.MediaItem, ...],
    prediction: Sequence[int],
) -> list[api.Request]:
    allowed = None
    if request.sampling.allowed_token_ids is not None:
        allowed = await allowed_token_ids(
            request.sampling.allowed_token_ids, terms.call, loaded.engine.model.vocab_size
        )
    adapter = loaded.adapter_for(media) if media else loaded.adapter
    prepared = await all_prepared(loaded, terms.call, prompts, terms.cache_salt, media, adapter)
    requests: list[api.Request] = []
    for ids, made in zip(prompts, prepared, strict=True):
        if requests:
            await asyncio.sleep(0)  # parameters are checked for each prompt
        first = len(requests)
        requests += (
            terms.engine_request(
                f"{id}-{first + choice}",
                ids,
                params,
                adapter,
                prepared=made,
                media=media,
                speculative=request.speculative,
                prediction=prediction,
            )
            for choice, params in enumerate(
                sampling_params(request, len(ids), matchers, loaded.defaults, loaded.engine.model, allowed)
            )
        )
    return requests


def _check(config: ServerConfig, request: GenerateRequest) -> None:
    """Raise InvalidRequest if the request has more sequences than an empty queue accepts. Retrying would always fail."""
    num_prompts, width = request.prompt.num_prompts, request.num_candidates
    limit = min(config.max_queue, config.max_num_seqs_per_key or config.max_queue)
    if num_prompts * width > limit:
        field = request.candidates_field
        raise InvalidRequest(
            f"{num_prompts} prompts with ", field, f"={width} are {num_prompts * width} sequences; ",
            f"this server takes at most {limit}",
            param=field if width > 1 else request.prompt.field,
        )  # fmt: skip


def _fitted(
    loaded: LoadedModel, request: GenerateRequest, encoded: EncodedPrompts, given: Sequence[int]
) -> Sequence[int]:
    if not given:
        field = request.prompt.field
        raise InvalidRequest(field, " is empty: at least one token is required", param=field)
    if request.truncation is None:
        return given
    max_tokens = request.default_max_tokens if request.max_tokens is None else request.max_tokens
    kept = truncated(given, request.truncation, max_tokens, loaded.engine.model.max_model_len)
    if encoded.media and len(kept) < len(given):
        raise InvalidRequest(TRUNCATE, " is not supported for prompts with media or embeddings", param=TRUNCATE)
    return kept


def _text_options(request: GenerateRequest, encoded: EncodedPrompts, constrained_by: str | None) -> TextOptions:
    return TextOptions(
        **structs.asdict(request.shown),
        min_tokens=request.sampling.min_tokens or 0,
        continues_prompt=encoded.continues,
        output_parser=encoded.output_parser,
        constrained_by=constrained_by,
    )


def _check_beams(request: GenerateRequest, model: api.ModelInfo) -> None:
    """Raise InvalidRequest if there are more beams and end tokens than tokens in the vocabulary."""
    width = request.num_candidates
    num_ends = len(model.eos_token_ids) + len(request.sampling.stop_token_ids or ())
    if request.beams is not None and width + num_ends > model.vocab_size:
        raise InvalidRequest(
            f"{width} beams are too many for a vocabulary of {model.vocab_size}", param=request.candidates_field
        )
