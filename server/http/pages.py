"""Static pages: one file each, of which nothing is loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

# A page talks to this server and nothing else; nobody may frame one that can spend this machine's time.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page(name: str) -> Response:
    """The file `name` of `server/web`."""
    return Response(_content(name), media_type="text/html", headers=_HEADERS)


@cache
def _content(name: str) -> bytes:
    return (files("server") / "web" / name).read_bytes()
