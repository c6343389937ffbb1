"""POST /v1/embeddings: a vector for each text, as OpenAI has it, with vLLM's fields."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.pooling import answers, api_types, request_types
from server.api.pooling.pooled import pooled_for, written
from server.api.pooling.prepare import of_embeddings
from server.api.pooling.vectors import base64_of, json_of
from server.api.route import GENERATION_REFUSALS, JSON, Operation, route
from server.api.service import Service
from server.http.body import body_cost, read_request
from server.models import lookup


@route(
    "POST",
    "/v1/embeddings",
    Operation(
        "createEmbedding", "Pooling", "A vector for each text", {JSON: api_types.Embeddings}, request_types.EmbeddingsRequest,
        GENERATION_REFUSALS,
    ),
)  # fmt: skip
async def create(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.EMBEDDINGS, service.config, service.offload)
    loaded = await lookup.pooled_by(loaded, given.model)
    served = loaded.require_pooling("embed")
    request = await service.offload.run(body_cost(http), lambda: of_embeddings(given, served, "embed"))
    envelope, results = await pooled_for(service, loaded, http, request, prefix="embd-")
    write = base64_of if given.encoding_format == "base64" else json_of
    items = answers.vectors(results, write, kind="embedding", name="embedding")
    return await written(service, envelope.listed(results, items), results)
