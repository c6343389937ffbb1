"""GET /version."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server.api.route import JSON, Operation, route
from server.api.service import Service
from server.config import __version__
from server.http.answers import json_response


class Version(Struct):
    version: str


@route("GET", "/version", Operation("version", "Server", "The server's version", {JSON: Version}))
async def version(service: Service, http: Request) -> Response:
    return json_response({"version": __version__})
