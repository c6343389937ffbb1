"""GET /: the built-in chat page, one static file without a build step."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.http import pages
from server.route import HTML, Operation, route
from server.service import Service


@route("GET", "/", Operation("chatPage", "Pages", "The built-in chat page", {HTML: None}))
async def page(service: Service, http: Request) -> Response:
    return pages.page("index.html")
