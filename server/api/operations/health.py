"""Routes about the server's state: GET /health with /live, /ready and /generate, /ping, /load, /version and /metrics.

/health routes return 200, or 503 with a reason. /health/live fails if only a restart can help. /health and /health/ready succeed
if requests are accepted and engine steps complete at their usual speed. /health/generate computes a token. After consecutive
failed steps, every check computes a token, since only a successful step ends the failure. Health checks wake no sleeping model."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from server.api.route import JSON, TEXT, Route, route
from server.api.service import Service
from server.config import __version__
from server.http.answers import json_response
from server.http.metrics import exposition, registry


class Health(Struct):
    """Body of /health. `running`, `waiting`: numbers of sequences. `sleep_level`: set while the model sleeps. `phase` to `unit`:
    progress while it loads. `reason`: set after a failure. `models`: status of each of several models."""

    status: Literal["ok", "loading", "draining", "failed"]
    running: int | UnsetType = UNSET
    waiting: int | UnsetType = UNSET
    sleep_level: int | UnsetType = UNSET
    models: dict[str, Literal["unloaded", "loading", "loaded"]] | UnsetType = UNSET
    reason: str | UnsetType | None = UNSET
    phase: str | UnsetType = UNSET
    done: int | UnsetType = UNSET
    total: int | UnsetType | None = UNSET
    unit: str | UnsetType = UNSET


@route("GET", "/health", "health", "Server", "200 while requests may enter and are worked on", {JSON: Health})
async def health(service: Service, http: Request) -> Response:
    return _readiness(service)


@route("GET", "/health/ready", "healthReady", "Server", "The same as /health", {JSON: Health})
async def ready(service: Service, http: Request) -> Response:
    return _readiness(service)


@route("GET", "/health/live", "healthLive", "Server", "200 unless only another process can help", {JSON: Health})
async def live(service: Service, http: Request) -> Response:
    status, body = service.lifecycle.liveness()
    return json_response(body, status)


@route("GET", "/health/generate", "healthGenerate", "Server", "200 once a token has really come", {JSON: Health})
async def generate(service: Service, http: Request) -> Response:
    lifecycle = service.lifecycle
    status, body = lifecycle.health()
    if (status == 200 and "sleep_level" not in body) or lifecycle.steps_fail():
        reason = None
        for each in lifecycle.require_model().resident[:1]:  # nobody loads a model by it
            reason = await service.token_probe.failure(each.engine)
        status, body = lifecycle.health()
        if reason is not None and status == 200:
            status, body = 503, {**body, "status": "failed", "reason": reason}
    return json_response(body, status)


def _readiness(service: Service) -> Response:
    lifecycle = service.lifecycle
    if lifecycle.steps_fail():
        for each in lifecycle.require_model().resident[:1]:
            service.token_probe.begin(each.engine)
    status, body = lifecycle.health()
    return json_response(body, status)


async def _ping(service: Service, http: Request) -> Response:
    status, body = service.lifecycle.health()
    return json_response(body, status)


GET, POST = (
    Route(
        _ping, method, "/ping", f"ping{method.title()}", "Server", "The same as /health", {JSON: Health}, None, (503,)
    )
    for method in ("GET", "POST")
)


class Version(Struct):
    version: str


@route("GET", "/version", "version", "Server", "The server's version", {JSON: Version})
async def version(service: Service, http: Request) -> Response:
    return json_response(Version(__version__))


class ServerLoad(Struct):
    server_load: int


@route("GET", "/load", "serverLoad", "Server", "Requests in the engine", {JSON: ServerLoad}, refusals=(503,))
async def server_load(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    health = loaded.engines.health()
    return json_response(ServerLoad(health.num_running + health.num_waiting + loaded.num_waiting))


@route("GET", "/metrics", "metrics", "Server", "Counters in Prometheus' text format", {TEXT: None})
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
