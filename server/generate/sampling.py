"""Conversion of a request's sampling fields to the engine's SamplingParams, with the model's defaults.

All values that depend on the model are checked here, because the engine does not check them: token ids must be in the
vocabulary, and token counts must fit the context."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

from runtime.api import MatcherFactory, ModelInfo, SamplingParams
from server.generate.request import GenerateRequest
from server.http.call import Call
from server.http.errors import ContextLengthExceeded, Field, InvalidRequest, clip
from server.http.wire_fields import Sampling

# Below the first, dividing by the temperature says no more than argmax; below the second it overflows float32 logits.
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01

MIN_TOKENS, MAX_TOKENS, LOGIT_BIAS = map(Field, ("min_tokens", "max_tokens", "logit_bias"))
IDS_PER_CHAR = 10  # looked at while a character is tokenised
ALLOWED = Field("allowed_token_ids")
STOP_TOKEN_IDS, LOGPROB_TOKEN_IDS = map(Field, ("stop_token_ids", "logprob_token_ids"))
T = TypeVar("T")

# Fields that are resolved or checked one by one below. The engine takes every other of its own as a client gave it.
_RESOLVED: Final = {
    "temperature",
    "top_k",
    "seed",
    "min_tokens",
    "logit_bias",
    "stop_token_ids",
    "allowed_token_ids",
    "logprob_token_ids",
}
_ENGINE_FIELDS: Final = {field.name for field in dataclasses.fields(SamplingParams)}
_AS_GIVEN: Final = [name for name in Sampling.__struct_fields__ if name in _ENGINE_FIELDS - _RESOLVED]


def sampling_params(
    request: GenerateRequest,
    num_prompt_tokens: int,
    matchers: tuple[MatcherFactory, ...],
    defaults: SamplingParams,
    model: ModelInfo,
    allowed: frozenset[int] | None = None,
) -> list[SamplingParams]:
    """Return the sampling parameters of each sequence of one prompt. Only the first sequence computes prompt log-probabilities,
    unless answers are streamed. `allowed`: result of `allowed_token_ids`.

    Raises ContextLengthExceeded, or InvalidRequest for ids outside the vocabulary or min_tokens above max_tokens."""
    max_tokens = _resolve_max_tokens(
        request.max_tokens, request.default_max_tokens, num_prompt_tokens, model, request.prompt.field
    )
    params = _shared_params(request, max_tokens, matchers, defaults, model, allowed)
    count = request.n if request.beams else request.num_candidates
    return [for_choice(params, choice, with_prompt_logprobs=choice == 0 or request.stream) for choice in range(count)]


def _shared_params(
    request: GenerateRequest,
    max_tokens: int,
    matchers: tuple[MatcherFactory, ...],
    defaults: SamplingParams,
    model: ModelInfo,
    allowed: frozenset[int] | None,
) -> SamplingParams:
    wanted = request.sampling
    min_tokens = wanted.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(MIN_TOKENS, f" {min_tokens} is more than ", MAX_TOKENS, f" {max_tokens}", param=MIN_TOKENS)
    temperature = defaults.temperature if wanted.temperature is None else wanted.temperature
    top_k = defaults.top_k if wanted.top_k is None else wanted.top_k
    as_given: dict[str, Any] = {
        name: getattr(defaults, name) if (value := getattr(wanted, name)) is None else value for name in _AS_GIVEN
    }
    return SamplingParams(
        **as_given,
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else max(temperature, LOWEST_TEMPERATURE),
        top_k=0 if top_k < 0 or top_k >= model.vocab_size else top_k,
        seed=None if wanted.seed == -1 else wanted.seed,
        logit_bias=_logit_bias(wanted.logit_bias or {}, model.vocab_size),
        stop_token_ids=_checked(wanted.stop_token_ids or (), model.vocab_size, STOP_TOKEN_IDS, frozenset),
        min_tokens=min_tokens,
        allowed_token_ids=allowed,
        logprobs=_logprobs(request, model.vocab_size),
        logprob_token_ids=_checked(wanted.logprob_token_ids or (), model.vocab_size, LOGPROB_TOKEN_IDS, tuple),
        prompt_logprobs=_at_most(request.num_prompt_logprobs, model.vocab_size),
        matchers=matchers,
    )


def for_choice(params: SamplingParams, choice: int, *, with_prompt_logprobs: bool = True) -> SamplingParams:
    """Return the parameters of answer number `choice`. If `params` has a seed, each answer gets a different seed."""
    if params.prompt_logprobs is not None and not with_prompt_logprobs:
        params = dataclasses.replace(params, prompt_logprobs=None)
    if params.seed is None or choice == 0:
        return params
    return dataclasses.replace(params, seed=(params.seed + choice + 2**63) % 2**64 - 2**63)


async def allowed_token_ids(ids: Sequence[int], call: Call, vocab_size: int) -> frozenset[int]:
    """Return `ids` as a set, checked off the event loop, because `ids` can be as large as the vocabulary. Called once per request.

    Raises InvalidRequest."""
    if len(ids) > vocab_size:
        raise InvalidRequest(ALLOWED, f" has {len(ids)} ids; the vocabulary has {vocab_size} tokens", param=ALLOWED)

    def checked() -> frozenset[int]:
        check_token_ids(ids, vocab_size, ALLOWED)
        return frozenset(ids)

    return await call.run(len(ids) // IDS_PER_CHAR, checked)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: Field) -> None:
    """Raise InvalidRequest if an id is outside the vocabulary. The caller has already rejected negative ids."""
    if ids and (largest := max(ids)) >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary of {vocab_size}", param=param)


def _resolve_max_tokens(
    wanted: int | None, default: int | None, prompt_tokens: int, model: ModelInfo, param: Field
) -> int:
    """Return the maximum number of generated tokens. `wanted`: the client's limit. `default`: limit if `wanted` is None; None means
    the rest of the context.

    Raises ContextLengthExceeded if the context has too few tokens left for `wanted`, or none."""
    limit = model.max_model_len
    room = limit - prompt_tokens
    if room < 1 and (wanted != 0 or room < 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, and the prompt has {prompt_tokens}; "
            "shorten it so that at least one token can be generated",
            param=param,
        )
    if wanted is not None and wanted > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + wanted} "
            f"({prompt_tokens} in the prompt, {wanted} for the answer)",
            param=param,
        )
    if wanted is None:
        return room if default is None else min(default, room)
    return wanted


def _at_most(value: int | None, limit: int) -> int | None:
    return None if value is None else min(value, limit)


def _logprobs(request: GenerateRequest, vocab_size: int) -> int | None:
    """Return the number of alternatives per token, or None. With `best_of`, log-probabilities are always computed."""
    if request.shown.logprobs is None and request.num_candidates > request.n:
        return 0
    return _at_most(request.shown.logprobs, vocab_size)


def _checked(ids: Sequence[int], vocab_size: int, param: Field, kind: Callable[[Sequence[int]], T]) -> T:
    check_token_ids(ids, vocab_size, param)
    return kind(ids)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> Mapping[int, float]:
    ids: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(LOGIT_BIAS, f": {clip(key)!r} is not a token id", param=LOGIT_BIAS)
        ids[int(key)] = value
    check_token_ids(list(ids), vocab_size, Field("logit_bias"))
    assert all(map(math.isfinite, ids.values())), "the decoder takes no others"
    return MappingProxyType(ids)
