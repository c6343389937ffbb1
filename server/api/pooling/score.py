"""POST /score and /v1/score: how well two texts go together, for each pair, as vLLM has it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.pooling import answers, api_types, request_types
from server.api.pooling.pooled import pooled_for, written
from server.api.pooling.prepare import of_score
from server.api.route import GENERATION_REFUSALS, JSON, Operation, Route
from server.api.service import Service
from server.http.body import body_cost, read_request
from server.models import lookup


async def score(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.SCORE, service.config, service.offload)
    loaded = await lookup.pooled_by(loaded, given.model)
    served = loaded.require_pooling("score")
    comparison = await service.offload.run(body_cost(http), lambda: of_score(given, served))
    envelope, results = await pooled_for(service, loaded, http, comparison.request, prefix="score-")
    scores = await comparison.scores(service.offload, results)
    return await written(service, envelope.listed(results, answers.scored(scores)), results)


def _scoring(path: str, id: str) -> Route:
    operation = Operation(
        id, "Pooling", "How well two texts go together: a cross-encoder's score, or how near their vectors are",
        {JSON: api_types.Scores}, request_types.ScoreRequest, GENERATION_REFUSALS,
    )  # fmt: skip
    return Route("POST", path, score, operation)


SCORE, SCORE_V1 = _scoring("/score", "score"), _scoring("/v1/score", "scoreV1")
