"""From what a client wants generated to a Generation that can be opened: prompts as ids, parameters checked against the model,
one engine request for each sequence.

Whichever API it came by, a request passes here. Knows no HTTP and no frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from runtime import api
from server.config import ServerConfig
from server.errors import Field, InvalidRequest
from server.generate.beams import BeamParams
from server.generate.constraints import constraints_for
from server.generate.conversation import chat_prompt
from server.generate.generation import Generation, TextOptions
from server.generate.logprobs import Echo
from server.generate.preprocess import echoed, prompt_ids, truncated
from server.generate.request import Chat, GenerateRequest
from server.generate.sampling import sampling_params
from server.loaded.chat_format import OutputParser
from server.loaded.model import LoadedModel
from server.offload import SHORT_CHARS, Offload

logger = logging.getLogger("oneloop.http")

PRIORITY = Field("priority")
LONG_PROMPT = SHORT_CHARS  # tokens: to check and hash them is about as much work as to tokenise so many characters


async def start(
    config: ServerConfig, offload: Offload, served: LoadedModel, request: GenerateRequest, *, id: str, arrival_s: float
) -> tuple[Generation, tuple[Field, ...]]:
    """A Generation that is not opened yet, and the fields of `request` that the model's template does not read, which the client
    has to learn. Of each choice, Outputs become text by `Choice.feed` or events by `Choice.events`, with their
    log-probabilities by `take_logprobs`; `finish_reason` is set with the last of them. `arrival_s`: `time.monotonic()`.

    Raises ApiError, in whose message and `param` fields of GenerateRequest are Fields."""
    fits = request.truncation is None
    output_parser: OutputParser | None = None
    ignored: tuple[Field, ...] = ()
    continues = True
    if isinstance(request.prompt, Chat):
        prompt = await chat_prompt(served, offload, request.prompt, show_reasoning=request.shown.reasoning, fits=fits)
        prompts, output_parser, ignored = [prompt.ids], prompt.output_parser, prompt.ignored
        continues = request.prompt.continue_final_message
    else:
        prompts = await prompt_ids(served, offload, request.prompt, fits=fits)
    matchers = await constraints_for(served, request, output_parser)
    _check(config, served, request, len(prompts))
    beams = _beams(request, served.engine.model)
    requests: list[api.Request] = []
    echoes: list[Echo] = []
    for number, given in enumerate(prompts):
        ids = _fitted(served, request, given)
        if request.shown.echo:
            echoes.append(echoed(served.tokenizer, request, number, ids, is_cut=len(ids) < len(given)))
        choices = sampling_params(request, len(ids), matchers, served.defaults, served.engine.model)
        first = len(requests)
        prepared = await _prepared(served, offload, ids, request.cache_salt)
        requests += (
            api.Request(
                id=f"{id}-{first + choice}",
                prompt_ids=ids,
                params=params,
                priority=request.priority,
                cache_salt=request.cache_salt,
                arrival_s=arrival_s,
                prepared=prepared,
            )
            for choice, params in enumerate(choices)
        )
    options = _text_options(request, continues_prompt=continues, output_parser=output_parser)
    generation = Generation(served, requests, len(prompts), request.n, options, echoes, beams)
    if config.log_requests:
        logger.info(
            "%s: %d sequences, %d prompt tokens, %s",
            id,
            len(requests),
            generation.num_prompt_tokens,
            requests[0].params,
        )
    return generation, ignored


def _check(config: ServerConfig, served: LoadedModel, request: GenerateRequest, num_prompts: int) -> None:
    """Raises InvalidRequest where not even an empty queue would take all sequences, so that waiting would not help, or where the
    scheduler knows no priorities."""
    width, limit = request.num_candidates, config.max_queue
    if num_prompts * width > limit:
        field = request.candidates_field
        raise InvalidRequest(
            f"{num_prompts} prompts with ", field, f"={width} are {num_prompts * width} sequences; ",
            f"this server queues at most {limit}",
            param=field if width > 1 else request.prompt_field,
        )  # fmt: skip
    if request.priority and config.scheduling_policy != "priority":
        raise InvalidRequest(PRIORITY, " needs a server started with --scheduling-policy priority", param=PRIORITY)


def _fitted(served: LoadedModel, request: GenerateRequest, given: Sequence[int]) -> Sequence[int]:
    """The ids of a prompt, cut if the client wants that. Raises InvalidRequest."""
    if not given:
        field = request.prompt_field
        raise InvalidRequest(field, " is empty: there is no token to continue", param=field)
    if request.truncation is None:
        return given
    max_tokens = request.default_max_tokens if request.max_tokens is None else request.max_tokens
    return truncated(given, request.truncation, max_tokens, served.engine.model.max_model_len)


async def _prepared(
    served: LoadedModel, offload: Offload, ids: Sequence[int], cache_salt: str | None
) -> api.PreparedPrompt | None:
    """A long prompt checked and hashed on a thread, so that `Generation.open` costs the loop next to nothing; None for a short
    one."""
    if len(ids) <= LONG_PROMPT:
        return None
    return await offload.run(len(ids), partial(served.engine.prepare, ids, cache_salt))


def _text_options(
    request: GenerateRequest, *, continues_prompt: bool, output_parser: OutputParser | None
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
