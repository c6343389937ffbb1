"""GET /openapi.json and /docs: the document of this server's routes, and a static page that shows it."""

from __future__ import annotations

from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from server.api import openapi
from server.api.route import HTML, JSON, Operation, Route, route
from server.api.service import Service
from server.http import pages
from server.http.schema import Json

_NUM_CHARS = 30_000  # of the document: 8 ms, once


@route("GET", "/openapi.json", Operation("openapi", "Pages", "This document", {JSON: Json}))
async def document(service: Service, http: Request) -> Response:
    config = service.config
    routes: tuple[Route, ...] = http.scope["routes"]
    user_key = bool(config.api_key) or config.api_key_file is not None
    admin_key = config.admin_api_key is not None
    file = await service.offload.run(_NUM_CHARS, lambda: _document(routes, user_key, admin_key))
    return pages.answer(file, http, "no-cache")


@cache
def _document(routes: tuple[Route, ...], user_key: bool, admin_key: bool) -> pages.File:
    return pages.File.of("openapi.json", openapi.document(routes, user_key=user_key, admin_key=admin_key))


@route("GET", "/docs", Operation("docsPage", "Pages", "This document as a page", {HTML: None}))
async def page(service: Service, http: Request) -> Response:
    return await pages.page("docs.html", http, service.offload)
