"""Messages between ingress and replica: a request as plain data, and the pieces of its answer.

The first piece is ACCEPTED, then a Head, then the bytes of the body as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.types import Scope

Headers = Sequence[tuple[bytes, bytes]]
# Of an ASGI scope, what an application may look at and what is plain data.
_PLAIN = ("method", "scheme", "http_version", "path", "raw_path", "query_string", "root_path", "client", "server")
ACCEPTED: Final = None  # a replica has the request


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: Headers


Piece = Head | bytes | None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request. `prefixes`: names of how its prompt begins (`prefixes.py`), by which a replica is chosen; the replica has no use
    for them."""

    head: dict[str, Any]
    headers: Headers
    body: bytes
    prefixes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, scope: Scope, body: bytes, prefixes: tuple[bytes, ...] = ()) -> Forwarded:
        head = {name: scope[name] for name in _PLAIN if scope.get(name) is not None}
        return cls(head, [(bytes(name), bytes(value)) for name, value in scope["headers"]], body, prefixes)

    def without(self, header: bytes) -> Forwarded:
        return replace(self, headers=[(name, value) for name, value in self.headers if name.lower() != header])

    def scope(self) -> Scope:
        """Return the ASGI scope of the request."""
        asgi = {"version": "3.0", "spec_version": "2.3"}
        return {"type": "http", "asgi": asgi, "client": None, **self.head, "headers": list(self.headers)}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is complete, and `replica`, whose it is."""

    replica: str
    status: int
    headers: Headers
    body: bytes
