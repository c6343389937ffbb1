"""Checks of the Host header, and CORS: accepted hosts, and the web origins that may read responses.

A page of another site can point its own name at this machine's address (DNS rebinding). The browser then considers the server
part of that site, so neither CORS nor content types protect the server. The Host header still contains the site's name. A server
on a loopback address therefore accepts only localhost, IP addresses (which cannot be rebound), and names from options."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.call import call_in
from server.http.errors import BadHost, HostNotAllowed, OriginNotAllowed

LOOPBACK_NAMES = ("localhost", "*.localhost")
MAX_AGE_S = 600  # how long a browser may remember a preflight
EXPOSED = b"x-request-id, request-id, retry-after, x-ignored-fields"  # what scripts may read beside the body
_FIELD_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{1,4096}", re.ASCII)
Headers = list[tuple[bytes, bytes]]


class CheckHost:
    """Middleware that rejects unexpected Host headers. `allowed`: names, "*.name" for subdomains, or "*". IP addresses are
    always allowed."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._any = "*" in allowed
        self._names = frozenset(name.lower() for name in allowed if not name.startswith("*"))
        self._below = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Check the Host header. Raises BadHost or HostNotAllowed."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            if given or scope["http_version"] == "1.1":
                raise BadHost(len(given))
            return  # HTTP/1.0 need not say
        if not self._any and not self.allows(given[0].decode("latin-1")):
            raise HostNotAllowed(given[0].decode("latin-1"))

    def allows(self, host: str) -> bool:
        """Return whether `host`, the value of a Host header, is allowed: a name or an address, with or without a port."""
        name = _without_port(host.strip().lower()).removesuffix(".")
        return name in self._names or name.endswith(self._below) or _is_address(name)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (name.endswith("]") or ":" not in name) else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return None


def check_socket_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Check a WebSocket's Origin header: it must be the server's own host, or in `allowed` ("*" allows any). Browsers let pages
    of every site open sockets, and CORS does not apply to them. Raises OriginNotAllowed."""
    origin = _header(scope, b"origin")
    if origin is None or "*" in allowed:
        return
    text = origin.decode("latin-1")
    host = (_header(scope, b"host") or b"").decode("latin-1")
    if text not in allowed and text.partition("://")[2] != host:
        raise OriginNotAllowed(text)


class CrossOrigin:
    """CORS as two layers. `around` adds CORS headers to every response, including errors, so it is the outermost layer.
    `preflights` answers preflight requests inside the logging layer, but before keys are checked, because browsers send
    preflights without keys. Stream chunks bypass both layers. `origins`: allowed origins, such as "https://example.com", or only
    "*". `methods`: HTTP methods of all routes."""

    def __init__(self, origins: Collection[str], *, credentials: bool, methods: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode("ascii") for origin in origins)
        self._methods = ", ".join(sorted(methods)).encode("ascii")
        self._shared: Headers = [(b"access-control-expose-headers", EXPOSED)]
        if credentials:
            self._shared.append((b"access-control-allow-credentials", b"true"))

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._origins

    def _headers(self, origin: bytes | None) -> Headers:
        # A cache must not hand one origin's answer to another, nor an answer made for no origin.
        vary: Headers = [] if self._any else [(b"vary", b"Origin")]
        if origin is None or not self._allows(origin):
            return vary
        return [(b"access-control-allow-origin", b"*" if self._any else origin), *self._shared, *vary]

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wrap `app`: add CORS headers to every response."""

        async def cross_origin(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            headers = self._headers(_header(scope, b"origin"))

            async def send_start(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)

            call_in(scope).send_body = send  # chunks need no headers
            await app(scope, receive, send_start)

        return cross_origin

    def preflights(self, app: ASGIApp) -> ASGIApp:
        """Wrap `app`: answer preflight requests and pass on all other requests."""

        async def preflight(scope: Scope, receive: Receive, send: Send) -> None:
            origin = _header(scope, b"origin")
            if scope["method"] == "OPTIONS" and origin and _header(scope, b"access-control-request-method"):
                call_in(scope).route = "preflight"
                if not self._allows(origin):
                    raise OriginNotAllowed(origin.decode("latin-1"))
                await self._answer(scope, send)
            else:
                await app(scope, receive, send)

        return preflight

    async def _answer(self, scope: Scope, send: Send) -> None:
        headers = [
            (b"access-control-allow-methods", self._methods),
            (b"access-control-max-age", str(MAX_AGE_S).encode("ascii")),
            (b"vary", b"Access-Control-Request-Headers"),
        ]
        wanted = _header(scope, b"access-control-request-headers")
        # Any: clients' packages send a dozen of their own, and "*" would leave out Authorization.
        if wanted and _FIELD_NAMES.fullmatch(wanted):
            headers.append((b"access-control-allow-headers", wanted))
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
