"""POST /v2/embed and /v1/embed: vectors of texts, as Cohere has it."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.pooling import api_types, cohere
from server.api.pooling.pooled import pooled_for, written
from server.api.route import GENERATION_REFUSALS, JSON, Operation, Route
from server.api.service import Service
from server.http.body import body_cost, read_request
from server.http.call import note_ignored
from server.http.errors import FieldNames
from server.models import lookup

NAMES = FieldNames({"truncate_prompt_tokens": "max_tokens"})


async def _embed(older: bool, service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, cohere.EMBED, service.config, service.offload)
    loaded = await lookup.pooled_by(loaded, given.model)
    served, context = loaded.require_pooling("embed"), loaded.engine.model.max_model_len
    request, has_prompt = await service.offload.run(body_cost(http), lambda: cohere.of_embed(given, served, context))
    note_ignored(http, [] if has_prompt else ["input_type"], service.config)
    with NAMES.spoken():
        envelope, results = await pooled_for(service, loaded, http, request, prefix="embd-")
    cohere.check_lengths(given, results)
    parts = cohere.embed_parts(given, envelope, results, older=older)
    return await written(service, parts, results, len(given.written_types))


def _embedding(path: str, id: str, summary: str, *, older: bool) -> Route:
    answers = {JSON: api_types.CohereEmbeddings}
    operation = Operation(id, "Pooling", summary, answers, cohere.EmbedRequest, GENERATION_REFUSALS)
    return Route("POST", path, partial(_embed, older), operation)


EMBED = _embedding("/v2/embed", "cohereEmbed", "Vectors of texts, as Cohere has it", older=False)
OLDER_EMBED = _embedding(
    "/v1/embed",
    "cohereEmbedV1",
    "The same as its older clients have it: without embedding_types a plain list",
    older=True,
)
