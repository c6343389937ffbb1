"""From an HTTP request to what its inputs became, and from that to a body: what every pooling route does."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.pooling.answers import Envelope, Parts, cost_of
from server.api.pooling.request import PoolingRequest
from server.api.pooling.run import Pooled, pooled
from server.api.pooling.vectors import chunks
from server.api.service import Service
from server.http.answers import ChunkedJson
from server.http.call import arrival, request_id
from server.http.watch import while_waited_for
from server.models.model import LoadedModel


async def pooled_for(
    service: Service, loaded: LoadedModel, http: Request, request: PoolingRequest, *, prefix: str
) -> tuple[Envelope, list[Pooled]]:
    """What the inputs of `request` became. `prefix`: of the answer's id.

    Raises ApiError, EngineError, EngineFailed, and ClientLeft where nobody waits any more."""
    id = prefix + request_id(http.scope)
    work = pooled(service.config, service.offload, loaded, request, id=id, arrival=arrival(http.scope))
    return Envelope(id, loaded.name), await while_waited_for(http.receive, work)


async def written(service: Service, parts: Parts, results: Sequence[Pooled], num_kinds: int = 1) -> ASGIApp:
    """An answer of `parts`, which say the numbers of `results` in so many ways; off the loop where they are many."""
    return ChunkedJson(await service.offload.run_pieces(cost_of(results, num_kinds), chunks(parts)))
