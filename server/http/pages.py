"""Static pages: the files of `server/web`, without external resources.

A page is revalidated at each load (304 if unchanged). Its scripts and styles have URLs below `web/VERSION/`, where VERSION is a
hash of all files, and are cached for ever. URLs in pages are relative, so they work behind any prefix."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from server.http.call import call_of
from server.http.errors import RouteNotFound

WEB = Path(__file__).parents[1] / "web"
_NUM_CHARS = 260_000  # of all files: 20 ms, once

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "json": "application/json",
    "webmanifest": "application/manifest+json",
}

# A page talks to this server and nothing else, and no text becomes markup or a script; nobody may frame one that can spend this
# machine's time. The one policy of trusted types gives the address of the service worker (`web/install.js`).
_SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types oneloop-worker",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    compressed: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> PageFile:
        compressed = gzip.compress(body, mtime=0)
        etag = f'W/"{sha256(body).hexdigest()[:32]}"'  # weak: with or without gzip
        return cls(body, compressed, _TYPES[name.rpartition(".")[2]], etag)


@dataclass(frozen=True, slots=True)
class Site:
    version: str
    pages: Mapping[str, PageFile]
    assets: Mapping[str, PageFile]


@cache
def site() -> Site:
    """Return all pages and assets, read once."""
    found = {each.name: each.read_bytes() for each in WEB.iterdir() if each.is_file()}
    found = {name: found[name] for name in sorted(found) if name.rpartition(".")[2] in _TYPES}
    assets = {name: PageFile.of(name, body) for name, body in found.items() if not name.endswith(".html")}
    version = sha256("".join(name + file.etag for name, file in assets.items()).encode()).hexdigest()[:16]
    at = f'"web/{version}/'.encode()
    pages = {
        name: PageFile.of(name, body.replace(b'"web/', at)) for name, body in found.items() if name.endswith(".html")
    }
    return Site(version, pages, assets)


async def page(name: str, http: Request) -> Response:
    """Return the response with the page called `name`."""
    found = await call_of(http).run(_NUM_CHARS, site)
    return answer(found.pages[name], http, "no-cache")


async def asset(version: str, name: str, http: Request) -> Response:
    """Return the response with the file `name` that pages of `version` load. Raises RouteNotFound, also for other versions."""
    found = await call_of(http).run(_NUM_CHARS, site)
    if version != found.version or name not in found.assets:
        raise RouteNotFound(http.method, http.url.path)
    response = answer(found.assets[name], http, "public, max-age=31536000, immutable")
    if name == "worker.js":
        response.headers["Service-Worker-Allowed"] = "../../"  # the pages' folder, behind any prefix
    return response


def answer(file: PageFile, http: Request, caching: str) -> Response:
    """Return the response with `file`, compressed if possible, or 304 if the client has it. `caching`: the Cache-Control header."""
    headers = {**_SAFETY, "Cache-Control": caching, "ETag": file.etag}
    known = {each.strip() for each in http.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    accepted = {each.strip().lower() for each in http.headers.get("accept-encoding", "").split(",")}
    if "gzip" in accepted:
        return Response(file.compressed, media_type=file.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.body, media_type=file.media_type, headers=headers)
