"""Conversion of the pooling routes' wire types to PoolRequest, and to Comparison for pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.api import PoolingTask
from server.api.openai import requests
from server.api.openai.request_types import TokenizeRequest
from server.api.pooling import request_types
from server.api.pooling.compare import Comparison
from server.api.pooling.request import Input, Pair, PoolRequest, PoolText, check_count, texts_of
from server.generate.request import Chat, Truncation
from server.http.errors import Field, InvalidRequest
from server.models.pooling import ServedPooling

NamedText = tuple[str, str]  # a text, and its field


def of_embeddings(given: request_types.EmbeddingsRequest, served: ServedPooling, task: PoolingTask) -> PoolRequest:
    """Convert an embedding request. Raises InvalidRequest if fields contradict each other or the model lacks the task."""
    params = served.params(task, dimensions=given.dimensions, use_activation=given.use_activation)
    prefix = served.prompts.text(given.prompt_name, "prompt_name")
    return PoolRequest(inputs=_inputs(given), params=params, prefix=prefix, **_shared(given), **_special(given))


def of_classify(given: request_types.ClassifyRequest, served: ServedPooling) -> PoolRequest:
    """Convert a classification request. Raises InvalidRequest."""
    params = served.params("classify", use_activation=given.use_activation)
    return PoolRequest(inputs=_inputs(given), params=params, **_shared(given), **_special(given))


def of_score(given: request_types.ScoreRequest, served: ServedPooling) -> Comparison:
    """Convert a score request. Raises InvalidRequest."""
    names = given.names
    first, second = (request_types.texts_written(getattr(given, name), name) for name in names)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send equally many, or only one of the first",
            param=names[0],
        )
    check_count(len(second), names[1])
    return _compared(given, served, first, second)


def of_rerank(given: request_types.RerankRequest, served: ServedPooling, *, cut: bool = False) -> Comparison:
    """Convert a rerank request. `cut`: long documents are truncated by default. Raises InvalidRequest."""
    check_count(len(given.documents), "documents")
    query = [(request_types.written(given.query, "query"), "query")]
    return _compared(given, served, query, request_types.texts_written(given.documents, "documents"), cut=cut)


def _compared(
    given: request_types.ComparingFields, served: ServedPooling, first: Sequence[NamedText], second: Sequence[NamedText], *,
    cut: bool = False,
) -> Comparison:  # fmt: skip
    scoring = served.scoring
    params = served.params(served.task, use_activation=given.use_activation)
    firsts = [PoolText(text, Field(name), given.max_tokens_per_query or None) for text, name in first]
    seconds = [PoolText(text, Field(name), given.max_tokens_per_doc or None) for text, name in second]
    inputs: list[Input] = [*firsts, *seconds]
    if scoring == "cross-encoder":
        each_with = firsts * len(seconds) if len(firsts) == 1 else firsts
        inputs = [Pair(*pair) for pair in zip(each_with, seconds, strict=True)]
    shared = _shared(given)
    if cut and shared["truncation"] is None:
        shared["truncation"] = Truncation(-1, "right")
    request = PoolRequest(
        inputs=inputs, params=params, field=_stem(second[0][1]), instruction=served.instruction(given.instruction), **shared
    )  # fmt: skip
    by_odds = scoring == "cross-encoder" and len(params.label_token_ids) == 2 and params.use_activation is False
    return Comparison(scoring, request, len(firsts), len(seconds), by_odds)


def _stem(name: str) -> str:
    return name.partition("[")[0]


def _inputs(given: request_types.InputFields) -> list[Any]:
    if given.messages is None:
        return texts_of(given.input or "", "input")
    return [_chat(given)]


def _chat(given: request_types.InputFields) -> Chat:
    return requests.chat_of(
        TokenizeRequest(
            messages=given.messages,
            add_special_tokens=given.add_special_tokens,
            allow_special_tokens=given.allow_special_tokens,
            add_generation_prompt=bool(given.add_generation_prompt),
            continue_final_message=given.continue_final_message,
            chat_template_kwargs=given.chat_template_kwargs,
        )
    )


def _special(given: request_types.InputFields) -> dict[str, Any]:
    return {
        "add_special_tokens": given.add_special_tokens is not False,
        "allow_special_tokens": given.allow_special_tokens is not False,
    }


def _shared(given: request_types.PoolingFields) -> dict[str, Any]:
    wanted = given.truncate_prompt_tokens
    return {
        "truncation": None if wanted is None else Truncation(wanted, given.truncation_side or "right"),
        **given.queue_terms,
    }
