"""GET /metrics: the numbers, in Prometheus' text format or as OpenMetrics; the HTTP ones also while nothing is loaded."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.route import TEXT, Operation, route
from server.api.service import Service
from server.http.metrics import exposition, registry


@route("GET", "/metrics", Operation("metrics", "Server", "Counters in Prometheus' text format", {TEXT: None}))
async def metrics(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.loaded
    numbers = [*(loaded.engine.metrics() if loaded else ()), *service.http_stats.metrics()]
    own, first = (loaded.swapped if loaded else None), service.config.served_names[0]
    others = {each.name: [*each.engine.metrics()] for each in (loaded.all[1:] if loaded else ())}
    if own is not None:
        numbers += own.swaps.metrics(own)
        for each in loaded.others if loaded else ():
            others.setdefault(each.name, []).extend(own.swaps.metrics(each))
    body, content_type = exposition(registry(numbers, first, others), http.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
