"""POST /pooling: what the model's own pooling gives, be it a vector, one for each token, or a head's numbers, as vLLM has it."""

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
    "/pooling",
    Operation(
        "pool", "Pooling", "What the model's pooling gives of each text: of all tokens, or a head's numbers",
        {JSON: api_types.PooledList}, request_types.PoolingRequest, GENERATION_REFUSALS,
    ),
)  # fmt: skip
async def pool(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.POOLING, service.config, service.offload)
    loaded = await lookup.pooled_by(loaded, given.model)
    served = loaded.require_pooling(given.task or "embed")
    task = given.task or served.task
    request = await service.offload.run(body_cost(http), lambda: of_embeddings(given, served, task))
    envelope, results = await pooled_for(service, loaded, http, request, prefix="pool-")
    write = base64_of if given.encoding_format == "base64" else json_of
    items = answers.vectors(results, write, kind="pooling", name="data")
    return await written(service, envelope.listed(results, items), results)
