"""Handlers of POST /api/embed and /api/embeddings in Ollama's format."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from msgspec.json import encode
from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.frames import HOLE, encoded
from server.api.ollama import api_types, request_types
from server.api.ollama.models import named
from server.api.pooling.pooled import filled, pooled_for, written
from server.api.pooling.request import PoolRequest, PoolText, texts_of
from server.api.pooling.vectors import json_of
from server.api.route import GENERATION_REFUSALS, JSON, route
from server.api.service import Service
from server.generate.request import Truncation
from server.http.body import read_request
from server.http.call import call_of, note_ignored, off_loop
from server.http.errors import Field
from server.http.schema import Wire
from server.models.model import LoadedModel
from server.models.pooling import ServedPooling

_Given = TypeVar("_Given", bound=request_types.OllamaEmbeddingFields)


@route(
    "POST", "/api/embed", "ollamaEmbed", "Ollama", "A normalised vector for each text, as Ollama has it",
    {JSON: api_types.OllamaEmbed}, request_types.OllamaEmbedRequest, GENERATION_REFUSALS, api_types.OllamaError,
)  # fmt: skip
async def embed(service: Service, http: Request) -> ASGIApp:
    given, loaded, served = await _read(service, http, request_types.EMBED)

    def prepare() -> PoolRequest:
        params = served.params("embed", dimensions=given.dimensions, use_activation=True)
        truncation = None if given.truncate is False else Truncation(-1, "right")
        prefix = served.prompts.text(None, "input")
        return PoolRequest(inputs=texts_of(given.input, "input"), params=params, prefix=prefix, truncation=truncation)

    request = await off_loop(http, prepare)
    begun_s = time.monotonic()
    _, results = await pooled_for(service, loaded, http, request, prefix="ollama-")
    since_s = call_of(http).arrival_s
    hole: Any = HOLE
    answer = api_types.OllamaEmbed(
        model=given.model,
        embeddings=hole,
        total_duration=_nanoseconds(time.monotonic() - since_s),
        load_duration=_nanoseconds(begun_s - since_s),
        prompt_eval_count=sum(each.num_tokens for each in results),
    )
    vectors = ((json_of(each.numbers), each.numbers.nbytes // 4) for each in results)
    return await written(call_of(http), filled(answer, vectors), results)


@route(
    "POST", "/api/embeddings", "ollamaEmbeddings", "Ollama",
    "The vector of a text as the model makes it, as older clients of Ollama ask for it",
    {JSON: api_types.OllamaEmbedding}, request_types.OllamaEmbeddingsRequest, GENERATION_REFUSALS, api_types.OllamaError,
)  # fmt: skip
async def embeddings(service: Service, http: Request) -> ASGIApp:
    given, loaded, served = await _read(service, http, request_types.EMBEDDINGS)
    request = PoolRequest(
        inputs=[PoolText(given.prompt, Field("prompt"))],
        params=served.params("embed", use_activation=False),
        field="prompt",
        prefix=served.prompts.text(None, "prompt"),
        truncation=Truncation(-1, "right"),
    )
    _, results = await pooled_for(service, loaded, http, request, prefix="ollama-")
    (result,) = results
    answer = encode(api_types.OllamaEmbedding(encoded(json_of(result.numbers))))
    return await written(call_of(http), iter([(answer, result.numbers.nbytes // 4)]), results)


async def _read(service: Service, http: Request, wire: Wire[_Given]) -> tuple[_Given, LoadedModel, ServedPooling]:
    """Read the request body and find its model. Return the body, the model, and the model's pooling. Raises ApiError."""
    loaded = service.lifecycle.require_model()
    given = await read_request(http, wire, service.config, from_any_program=True)
    loaded = await named(call_of(http), loaded, given.model)
    served = loaded.require_pooling("embed")
    note_ignored(http, ["options"] if given.options else [], service.config)
    return given, loaded, served


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
