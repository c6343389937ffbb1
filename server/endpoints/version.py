"""GET /version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.frames import json_response
from server.service import Service


async def version(service: Service, http: Request) -> Response:
    return json_response({"version": __version__})
