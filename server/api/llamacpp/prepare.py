"""Conversion of llama.cpp's requests to GenerateRequests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final, NamedTuple

from server.api.llamacpp import request_types
from server.generate.request import GenerateRequest, Infill, OutputConstraint, Prompt, Shown, Texts, json_schema, rules
from server.http.errors import FieldNames, InvalidRequest
from server.http.wire_fields import sampling_of

_SHARED_NAMES: Final = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "n": "n_cmpl"}
NAMES: Final = FieldNames(_SHARED_NAMES)
INFILL_NAMES: Final = FieldNames({**_SHARED_NAMES, "prompt": "input_prefix", "suffix": "input_suffix"})
BANNED: Final = -1e9  # finite, and nothing comes near


class Prepared(NamedTuple):
    """Converted request. `ignored`: fields without effect."""

    request: GenerateRequest
    ignored: list[str]


def of_completion(given: request_types.LlamaCompletionRequest) -> Prepared:
    """Convert a /completion request. Raises InvalidRequest."""
    return _prepared(given, Texts(given.prompts()))


def of_infill(given: request_types.LlamaInfillRequest) -> Prepared:
    extra = [(file.filename, file.text) for file in given.input_extra or []]
    return _prepared(given, Infill([given.input_prefix], given.input_suffix, extra, given.prompt or ""))


def _prepared(given: request_types.LlamaRequest, prompt: Prompt) -> Prepared:
    ignored: list[str] = []
    penalty = given.penalty(ignored, "repeat_last_n")
    num_predict = given.max_tokens if given.n_predict is None else given.n_predict
    request = GenerateRequest(
        prompt=prompt,
        sampling=sampling_of(
            given,
            temperature=None if given.temperature is None else max(0.0, given.temperature),
            seed=None if given.seed in request_types.RANDOM_SEEDS else given.seed,
            repetition_penalty=penalty,
            logit_bias=_biases(given),
        ),
        shown=Shown(
            stop=given.stop_strings,
            token_ids=bool(given.return_tokens or given.stream),
            logprobs=given.n_probs if given.n_probs else None,
        ),
        default_max_tokens=None
        if num_predict is None or num_predict < 0
        else num_predict,  # cut to what the context holds
        n=given.n_cmpl or 1,
        constraint=_constraint(given),
        stream=bool(given.stream),
        # A tenant of its own finds nothing in the prefix cache.
        cache_salt=uuid.uuid4().hex if given.cache_prompt is False else None,
    )
    return Prepared(request, ignored)


def _constraint(given: request_types.LlamaRequest) -> OutputConstraint | None:
    if given.grammar:
        return rules(given.grammar, "grammar")
    if given.json_schema is not None:
        return json_schema(given.json_schema, "json_schema")
    return None


def _biases(given: request_types.LlamaRequest) -> Mapping[str, float] | None:
    if given.logit_bias is None:
        return None
    pairs = given.logit_bias.items() if isinstance(given.logit_bias, dict) else given.logit_bias
    found: dict[str, float] = {}
    for id, bias in pairs:
        if bias is True:
            raise InvalidRequest("logit_bias: a bias is a number, or false to ban the token", param="logit_bias")
        found[str(id)] = BANNED if bias is False else bias
    return found
