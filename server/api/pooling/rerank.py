"""POST /rerank, /v1/rerank and /v2/rerank: documents by how well they answer a query, best first, as Jina and Cohere have it."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.pooling import answers, api_types, request_types
from server.api.pooling.cohere import meta
from server.api.pooling.pooled import pooled_for
from server.api.pooling.prepare import of_rerank
from server.api.route import GENERATION_REFUSALS, JSON, Operation, Route
from server.api.service import Service
from server.http.answers import json_response
from server.http.body import body_cost, read_request
from server.http.schema import Json
from server.models import lookup

DOCUMENT_CHARS = 20  # of an answer, written while a character is tokenised


async def _rerank(cut: bool, service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.RERANK, service.config, service.offload)
    loaded = await lookup.pooled_by(loaded, given.model)
    served = loaded.require_pooling("score")
    comparison = await service.offload.run(body_cost(http), lambda: of_rerank(given, served, cut=cut))
    envelope, results = await pooled_for(service, loaded, http, comparison.request, prefix="rerank-")
    scores = await comparison.scores(service.offload, results)

    def document(index: int) -> Json:
        return {"text": request_types.written(given.documents[index], "documents")}

    usage = answers.usage(results)

    def answer() -> ASGIApp:
        shown = None if given.return_documents is False else document
        body = {"id": envelope.id, "model": envelope.model, "usage": usage}
        ranked = answers.ranked(scores, shown, given.top_n)
        return json_response({**body, "results": ranked, "meta": meta(usage["prompt_tokens"], search_units=1)})

    return await service.offload.run(body_cost(http) // DOCUMENT_CHARS, answer)


def _ranking(path: str, id: str, *, cut: bool = False) -> Route:
    operation = Operation(
        id, "Pooling", "Documents by how well they answer a query, the best first", {JSON: api_types.Ranking},
        request_types.RerankRequest, GENERATION_REFUSALS,
    )  # fmt: skip
    return Route("POST", path, partial(_rerank, cut), operation)


RERANK, RERANK_V1 = _ranking("/rerank", "rerank"), _ranking("/v1/rerank", "rerankV1")
RERANK_V2 = _ranking("/v2/rerank", "rerankV2", cut=True)  # Cohere's, which cuts what is too long
