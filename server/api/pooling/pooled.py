"""Common steps of pooling routes: read the body, find the model, run the pooling, and write the response vector by vector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import UNSET, Struct
from msgspec.json import encode
from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.frames import HOLE, around
from server.api.pooling.api_types import Listed, PoolingUsage, Ranked, RankedDocument
from server.api.pooling.request import PoolRequest
from server.api.pooling.run import PooledInput, pooled
from server.api.pooling.vectors import chunks
from server.api.service import Service
from server.http.answers import ChunkedJson
from server.http.body import read_request
from server.http.call import Call, call_of
from server.http.schema import T, Wire
from server.http.watch import while_waited_for
from server.models import lookup
from server.models.model import LoadedModel

CHARS_PER_RESULT = 10  # what stands around the numbers of one
NUMBERS_PER_CHAR = 5  # written while a character is tokenised

Parts = Iterator[tuple[bytes, int]]  # of a JSON body, each with how many numbers it took to write


async def read(service: Service, http: Request, wire: Wire[T]) -> tuple[T, LoadedModel]:
    """Read the request body. Return the body, and the model that it selects. Raises ApiError."""
    loaded = service.lifecycle.require_model()
    given: Any = await read_request(http, wire, service.config)
    return given, await lookup.pooled_by(call_of(http), loaded, given.model)


async def pooled_for(
    service: Service, loaded: LoadedModel, http: Request, request: PoolRequest, *, prefix: str
) -> tuple[str, list[PooledInput]]:
    """Run `request`. Return the response's id, which begins with `prefix`, and one result per input.

    Raises ApiError, EngineError, EngineFailed, or ClientLeft if the client disconnects."""
    id = prefix + call_of(http).id
    work = pooled(service.config, call_of(http), loaded, request, id=id)
    return id, await while_waited_for(http.receive, work)


async def written(call: Call, parts: Parts, results: Sequence[PooledInput], num_kinds: int = 1) -> ASGIApp:
    """Return a response that consists of `parts`. It is encoded on a thread if `results` have many floats. `num_kinds`: number
    of encodings of each float."""
    num_numbers = num_kinds * sum(each.numbers.nbytes // 4 for each in results)
    cost = num_numbers // NUMBERS_PER_CHAR + CHARS_PER_RESULT * len(results)
    return ChunkedJson(await call.run_pieces(cost, chunks(parts)))


async def listed(
    call: Call, kind: type[Listed], id: str, model: str, items: Iterable[tuple[Struct, int]], results: Sequence[PooledInput]
) -> ASGIApp:  # fmt: skip
    """Return a response with a list of type `kind`. `items`: entries with their numbers of floats. `results`: for the usage
    field."""
    hole: Any = HOLE
    body = kind(id=id, created=int(time.time()), model=model, data=hole, usage=PoolingUsage.of(results))
    parts = ((encode(item), count) for item, count in items)
    return await written(call, filled(body, parts), results)


def filled(body: Struct, items: Iterable[tuple[bytes, int]]) -> Parts:
    """Yield the encoded `body` in parts, with the list of `items` in place of HOLE."""
    before, after = around(encode(body))
    yield before + b"[", 0
    for number, (item, count) in enumerate(items):
        yield (b"," + item if number else item), count
    yield b"]" + after, 0


def ranked(scores: Sequence[float], document: Callable[[int], str] | None, top_n: int | None) -> list[Ranked]:
    """Return the `top_n` best results in descending order of score; all if 0 or None. `document`: returns a document's text."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
    return [
        Ranked(
            index=index,
            document=UNSET if document is None else RankedDocument(document(index)),
            relevance_score=scores[index],
        )
        for index in order
    ]
