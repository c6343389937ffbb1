"""Pooling routes: OpenAI's /v1/embeddings; vLLM's /pooling, /classify and /score; /rerank of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from runtime.api import PoolingTask
from server.api.frames import encoded
from server.api.pooling import api_types, request_types
from server.api.pooling.pooled import listed, pooled_for, ranked, read
from server.api.pooling.prepare import of_classify, of_embeddings, of_rerank, of_score
from server.api.pooling.run import PooledInput
from server.api.pooling.vectors import as_array, base64_of, json_of
from server.api.route import GENERATION_REFUSALS, JSON, Route, route
from server.api.service import Service
from server.http.answers import json_response
from server.http.call import call_of, off_loop

DOCUMENT_CHARS = 20  # of an answer, written while a character is tokenised


def _items(
    item: Callable[[int, Any], Struct], results: Sequence[PooledInput], encoding_format: str | None
) -> Iterator[tuple[Struct, int]]:
    """Yield (object, number of floats) per result. `item`: creates the object from the result's index and encoded vector."""
    write = base64_of if encoding_format == "base64" else json_of
    for index, each in enumerate(results):
        yield item(index, encoded(write(each.numbers))), each.numbers.nbytes // 4


@route(
    "POST", "/v1/embeddings", "createEmbedding", "Pooling", "A vector for each text", {JSON: api_types.Embeddings},
    request_types.EmbeddingsRequest, GENERATION_REFUSALS,
)  # fmt: skip
async def embed(service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, request_types.EMBEDDINGS)
    served = loaded.require_pooling("embed")
    request = await off_loop(http, lambda: of_embeddings(given, served, "embed"))
    id, results = await pooled_for(service, loaded, http, request, prefix="embd-")
    items = _items(
        lambda index, numbers: api_types.Embedding(index=index, embedding=numbers), results, given.encoding_format
    )
    return await listed(call_of(http), api_types.Embeddings, id, loaded.name, items, results)


@route(
    "POST", "/pooling", "pool", "Pooling",
    "What the model's pooling gives of each text: of all tokens, or a head's numbers", {JSON: api_types.PooledList},
    request_types.PoolingRequest, GENERATION_REFUSALS,
)  # fmt: skip
async def pool(service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, request_types.POOLING)
    served = loaded.require_pooling(given.task or "embed")
    task: PoolingTask = given.task or served.task
    request = await off_loop(http, lambda: of_embeddings(given, served, task))
    id, results = await pooled_for(service, loaded, http, request, prefix="pool-")
    items = _items(
        lambda index, numbers: api_types.PooledData(index=index, data=numbers), results, given.encoding_format
    )
    return await listed(call_of(http), api_types.PooledList, id, loaded.name, items, results)


@route(
    "POST", "/classify", "classify", "Pooling", "The likeliest class of each text, and how likely all are",
    {JSON: api_types.Classifications}, request_types.ClassifyRequest, GENERATION_REFUSALS,
)  # fmt: skip
async def classify(service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, request_types.CLASSIFY)
    served = loaded.require_pooling("classify")
    request = await off_loop(http, lambda: of_classify(given, served))
    id, results = await pooled_for(service, loaded, http, request, prefix="classify-")
    labels = served.labels

    def items() -> Iterator[tuple[api_types.Classification, int]]:
        for index, each in enumerate(results):
            best = int(as_array(each.numbers).argmax())
            probs = encoded(json_of(each.numbers))
            yield api_types.Classification(index, labels[best], probs, len(labels)), len(labels)

    return await listed(call_of(http), api_types.Classifications, id, loaded.name, items(), results)


async def score(service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, request_types.SCORE)
    served = loaded.require_pooling("score")
    comparison = await off_loop(http, lambda: of_score(given, served))
    id, results = await pooled_for(service, loaded, http, comparison.request, prefix="score-")
    scores = await comparison.scores(call_of(http), results)
    items = ((api_types.Score(index=index, score=score), 1) for index, score in enumerate(scores))
    return await listed(call_of(http), api_types.Scores, id, loaded.name, items, results)


SCORE, SCORE_V1 = (
    Route(
        score, "POST", path, id, "Pooling",
        "How well two texts go together: a cross-encoder's score, or how near their vectors are",
        {JSON: api_types.Scores}, request_types.ScoreRequest, GENERATION_REFUSALS,
    )
    for path, id in (("/score", "score"), ("/v1/score", "scoreV1"))
)  # fmt: skip


async def _rerank(cut: bool, service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, request_types.RERANK)
    served = loaded.require_pooling("score")
    comparison = await off_loop(http, lambda: of_rerank(given, served, cut=cut))
    id, results = await pooled_for(service, loaded, http, comparison.request, prefix="rerank-")
    scores = await comparison.scores(call_of(http), results)

    def document(index: int) -> str:
        return request_types.written(given.documents[index], "documents")

    def answer() -> ASGIApp:
        usage, shown = api_types.PoolingUsage.of(results), None if given.return_documents is False else document
        meta = api_types.CohereMeta.of(usage.prompt_tokens, api_types.BilledUnits(search_units=1))
        return json_response(api_types.Ranking(id, loaded.name, usage, ranked(scores, shown, given.top_n), meta))

    return await call_of(http).run(call_of(http).body_cost // DOCUMENT_CHARS, answer)


RERANK, RERANK_V1, RERANK_V2 = (
    Route(
        partial(_rerank, cut), "POST", path, id, "Pooling", "Documents by how well they answer a query, the best first",
        {JSON: api_types.Ranking}, request_types.RerankRequest, GENERATION_REFUSALS,
    )
    for path, id, cut in (
        ("/rerank", "rerank", False), ("/v1/rerank", "rerankV1", False),
        ("/v2/rerank", "rerankV2", True),  # Cohere's, which cuts what is too long
    )
)  # fmt: skip
