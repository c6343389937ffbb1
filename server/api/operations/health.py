"""GET /health, /health/live, /health/ready and /health/generate: 200 or 503, and why.

`live`: whether waiting may help, or only another process. `ready`, and `/health` as ever: whether requests may enter and steps
settle as they usually do. `generate`: whether a token really comes. Where one step after another has failed, only one that settles
can tell that it is over, so whoever asks has one computed; but nobody wakes by it a model that sleeps."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from server.api.route import JSON, Operation, route
from server.api.service import Service
from server.http.answers import json_response


class Health(Struct):
    """`running` and `waiting` once a model is loaded; `sleep_level` while it sleeps, until the next request; `phase` to `unit`
    while it loads; `reason` when it failed; `models`: of several that take turns, where each stands."""

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


@route(
    "GET", "/health", Operation("health", "Server", "200 while requests may enter and are worked on", {JSON: Health})
)
async def health(service: Service, http: Request) -> Response:
    return _readiness(service)


@route("GET", "/health/ready", Operation("healthReady", "Server", "The same as /health", {JSON: Health}))
async def ready(service: Service, http: Request) -> Response:
    return _readiness(service)


@route(
    "GET",
    "/health/live",
    Operation("healthLive", "Server", "200 unless only another process can help", {JSON: Health}),
)
async def live(service: Service, http: Request) -> Response:
    status, body = service.lifecycle.liveness()
    return json_response(body, status)


@route(
    "GET", "/health/generate", Operation("healthGenerate", "Server", "200 once a token has really come", {JSON: Health})
)
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
