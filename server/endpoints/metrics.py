"""GET /metrics: the numbers, in Prometheus' text format; the HTTP ones also while nothing is loaded."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from server.http.metrics import registry
from server.routes.route import TEXT, Operation, route
from server.routes.service import Service


@route("GET", "/metrics", Operation("metrics", "Server", "Counters in Prometheus' text format", {TEXT: None}))
async def metrics(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.loaded
    numbers = [*(loaded.engine.metrics() if loaded else ()), *service.http_stats.metrics()]
    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    own, first = (loaded.swapped if loaded else None), service.config.served_names[0]
    others = {each.name: [*each.engine.metrics()] for each in (loaded.all[1:] if loaded else ())}
    if own is not None:
        numbers += own.swaps.metrics(own)
        for each in loaded.others if loaded else ():
            others.setdefault(each.name, []).extend(own.swaps.metrics(each))
    body = encode(registry(numbers, first, others))
    return Response(body, headers={"content-type": content_type})
