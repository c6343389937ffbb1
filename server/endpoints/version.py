"""GET /version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.http.body import json_response
from server.service import Service
from server.version import __version__


async def version(service: Service, http: Request) -> Response:
    return json_response({"version": __version__})
