"""POST /classify: the class that a model's head gives each text, as vLLM has it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.pooling import answers, api_types, request_types
from server.api.pooling.pooled import pooled_for, written
from server.api.pooling.prepare import of_classify
from server.api.route import GENERATION_REFUSALS, JSON, Operation, route
from server.api.service import Service
from server.http.body import body_cost, read_request
from server.models import lookup


@route(
    "POST",
    "/classify",
    Operation(
        "classify", "Pooling", "The likeliest class of each text, and how likely all are", {JSON: api_types.Classifications},
        request_types.ClassifyRequest, GENERATION_REFUSALS,
    ),
)  # fmt: skip
async def classify(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.CLASSIFY, service.config, service.offload)
    loaded = await lookup.pooled_by(loaded, given.model)
    served = loaded.require_pooling("classify")
    request = await service.offload.run(body_cost(http), lambda: of_classify(given, served))
    envelope, results = await pooled_for(service, loaded, http, request, prefix="classify-")
    items = answers.classes(results, served.labels)
    return await written(service, envelope.listed(results, items), results)
