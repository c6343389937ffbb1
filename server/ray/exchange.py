"""Exchange: one request to an ASGI application in this process. Its response is read piece by piece.

The application runs in its own task. When the reader leaves, the application receives `http.disconnect`, as from a connection.
Data sent between two reads is joined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.types import ASGIApp, Message, Scope

Headers = Sequence[tuple[bytes, bytes]]
# Of an ASGI scope, what an application may look at and what is plain data.
_PLAIN = ("method", "scheme", "http_version", "path", "raw_path", "query_string", "root_path", "client", "server")
ACCEPTED: Final = None  # a replica has the request


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers of a response."""

    status: int
    headers: Headers


Piece = ResponseHead | bytes | None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Request that an ingress forwards to a replica. `prefixes`: hashes of prompt prefixes (`prefixes.py`), which select the
    replica. The replica itself does not use them."""

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
class ReplicaAnswer:
    """Complete response of the replica `replica`."""

    replica: str
    status: int
    headers: Headers
    body: bytes


class Exchange:
    def __init__(self, app: ASGIApp, request: Forwarded) -> None:
        self._request = request
        self._left = asyncio.Event()
        self._has_body = True
        self._head: ResponseHead | None = None
        self._body: list[bytes] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(app), name="exchange")

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._request.scope(), self._receive, self._send)
        finally:
            self._news.set()

    async def _receive(self) -> Message:
        if self._has_body:
            self._has_body = False
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = ResponseHead(message["status"], [*message.get("headers", ())])
        elif body := message.get("body", b""):
            self._body.append(body)
        self._news.set()

    async def pieces(self) -> AsyncGenerator[ResponseHead | bytes]:
        """Yield the head and the body's pieces. May be called once. Stop by `leave`, or by closing the generator. Raises the
        application's errors."""
        try:
            begun = False
            while True:
                await self._news.wait()
                self._news.clear()
                if self._head is not None and not begun:
                    begun = True
                    yield self._head
                while self._body:
                    piece = b"".join(self._body)
                    self._body.clear()
                    yield piece
                if self._task.done() and not self._body:
                    self._task.result()
                    return
        finally:
            self.leave()

    def leave(self) -> None:
        """Send a client's disconnect to the application."""
        self._left.set()

    def when_over(self, call: Callable[[asyncio.Task[None]], object]) -> asyncio.Task[None]:
        """Return the application's task. `call` is called with the task when it ends."""
        self._task.add_done_callback(call)
        return self._task
