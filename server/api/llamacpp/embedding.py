"""Handlers of POST /embedding and /embeddings in llama.cpp's format."""

from __future__ import annotations

from msgspec.json import encode
from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.frames import encoded
from server.api.llamacpp import api_types, request_types
from server.api.pooling.pooled import Parts, pooled_for, read, written
from server.api.pooling.request import PoolRequest, texts_of
from server.api.pooling.vectors import json_of
from server.api.route import GENERATION_REFUSALS, JSON, Route
from server.api.service import Service
from server.http.call import call_of, off_loop


async def embed(service: Service, http: Request) -> ASGIApp:
    given, loaded = await read(service, http, request_types.EMBEDDING)
    served = loaded.require_pooling("embed")
    field = "input" if given.content is None else "content"
    normalise = None if given.embd_normalize is None else given.embd_normalize == 2

    def prepare() -> PoolRequest:
        params, prefix = served.params(served.task, use_activation=normalise), served.prompts.text(None, field)
        return PoolRequest(inputs=texts_of(getattr(given, field), field), params=params, field=field, prefix=prefix)

    request = await off_loop(http, prepare)
    _, results = await pooled_for(service, loaded, http, request, prefix="embd-")

    def parts() -> Parts:
        for index, each in enumerate(results):
            numbers = json_of(each.numbers)
            rows = encoded(numbers if each.numbers.ndim == 2 else b"[" + numbers + b"]")
            yield (b"," if index else b"[") + encode(api_types.LlamaEmbedding(index, rows)), each.numbers.nbytes // 4
        yield b"]", 0

    return await written(call_of(http), parts(), results)


EMBEDDING, EMBEDDINGS = (
    Route(
        embed, "POST", path, id, "llama.cpp", "A vector for each text, as llama.cpp has it", {JSON: list[api_types.LlamaEmbedding]},
        request_types.LlamaEmbeddingRequest, GENERATION_REFUSALS,
    )
    for path, id in (("/embedding", "llamaEmbedding"), ("/embeddings", "llamaEmbeddings"))
)  # fmt: skip
