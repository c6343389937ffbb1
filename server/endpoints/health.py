"""GET /health: 200 only while requests may enter and steps settle; else 503 and why."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.http.body import json_response
from server.service import Service


async def health(service: Service, http: Request) -> Response:
    status, body = service.lifecycle.health()
    return json_response(body, status)
