"""GET and POST /ping: /health by the name under which SageMaker asks for it; open as that is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.operations.health import Health
from server.api.route import JSON, Operation, Route
from server.api.service import Service
from server.http.answers import json_response


async def _ping(service: Service, http: Request) -> Response:
    status, body = service.lifecycle.health()
    return json_response(body, status)


def _pinging(method: str) -> Route:
    operation = Operation(f"ping{method.title()}", "Server", "The same as /health", {JSON: Health}, refusals=(503,))
    return Route(method, "/ping", _ping, operation)


GET, POST = map(_pinging, ("GET", "POST"))
