"""GET /load: how many requests the engine has, for load balancers. vLLM's path and field."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server.api.route import JSON, Operation, route
from server.api.service import Service
from server.http.answers import json_response
from server.models import engines


class ServerLoad(Struct):
    server_load: int


@route("GET", "/load", Operation("serverLoad", "Server", "Requests in the engine", {JSON: ServerLoad}, refusals=(503,)))
async def server_load(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    health = engines.health(loaded.engines)
    return json_response({"server_load": health.num_running + health.num_waiting + loaded.num_waiting})
