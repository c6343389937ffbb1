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
    beside = {each.name: each.engine.metrics() for each in (loaded.all[1:] if loaded else ())}
    body = encode(registry(numbers, service.config.served_names[0], beside))
    return Response(body, headers={"content-type": content_type})
