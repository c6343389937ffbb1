"""GET /: the built-in chat page, one static file without a build step."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from server.service import Service

# Nothing from elsewhere, and nobody may frame a page that can spend this machine's time.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def page(service: Service, http: Request) -> Response:
    return Response(_page(), media_type="text/html", headers=_HEADERS)


@cache
def _page() -> bytes:
    return (files("server") / "web" / "index.html").read_bytes()
