"""Hosts: by which names a server may be called.

A page of another site can point its own name at this machine's address (DNS rebinding). A browser then takes the server for a
part of that site, and neither CORS nor content types protect it; but the Host header still carries the name. So a server that
only this machine reaches answers to localhost and to addresses, which nobody can rebind, and to nothing else unless it is told."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import BadHost, HostNotAllowed

LOOPBACK_NAMES = ("localhost", "*.localhost")


class CheckHost:
    """The layer that refuses requests for other hosts. `allowed`: names, "*.name" for all below one, or "*"; addresses always
    are."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._any = "*" in allowed
        self._names = frozenset(name.lower() for name in allowed if not name.startswith("*"))
        self._below = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises BadHost or HostNotAllowed."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            if given or scope["http_version"] == "1.1":
                raise BadHost(len(given))
            return  # HTTP/1.0 need not say
        if not self._any and not self.allows(given[0].decode("latin-1")):
            raise HostNotAllowed(given[0].decode("latin-1"))

    def allows(self, host: str) -> bool:
        """Whether a Host header may be so: a name or an address, with or without a port."""
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
