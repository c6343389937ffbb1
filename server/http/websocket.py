"""WebSockets: the opening handshake, which is processed as an HTTP request, and the open socket.

The handshake is answered with status 101 or refused. Hosts, keys, limits, errors, the access log and metrics therefore work as
for every route. The protocol is uvicorn's WebSocket protocol over wsproto (`socket_protocol`, imported with the first socket)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from runtime.api import Metric
from server.http.clients import Clients
from server.http.errors import ClientLeft, UpgradeRequired

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from server.http.socket_protocol import SocketProtocol

SOCKET = "websocket"  # of a scope: its Socket
_REFUSAL = "websocket.http.response"


class Code(IntEnum):
    """Status code of a WebSocket's closing (RFC 6455, 7.4.1)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    INTERNAL_ERROR = 1011


class Socket:
    """Open WebSocket. `subprotocols`: names that the client offers."""

    def __init__(self, receive: Receive, send: Send, subprotocols: Collection[str]) -> None:
        self._receive = receive
        self._send = send
        self.subprotocols = subprotocols

    async def accept(self, send: Send, subprotocol: str | None = None) -> None:
        """Answer the handshake with status 101. `send`: the route's ASGI `send`, which passes through all layers."""
        await send({"type": "http.response.start", "status": 101, "headers": [], "subprotocol": subprotocol})

    async def receive(self) -> str | bytes:
        """Return the next message. Raises ClientLeft."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise ClientLeft
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, text: str) -> None:
        """Send a text message. Waits until the client has read enough of the earlier messages. Raises ClientLeft."""
        try:
            await self._send({"type": "websocket.send", "text": text})
        except OSError:
            raise ClientLeft from None

    async def close(self, code: Code, reason: str = "") -> None:
        """Close the socket with `code` and `reason`. Raises ClientLeft."""
        try:
            await self._send({"type": "websocket.close", "code": int(code), "reason": reason})
        except OSError:
            raise ClientLeft from None


def socket_of(scope: Scope) -> Socket:
    """Return the Socket of a handshake. Raises UpgradeRequired if the request is not a handshake."""
    if SOCKET not in scope:
        raise UpgradeRequired(scope["path"])
    found: Socket = scope[SOCKET]
    return found


async def as_request(scope: Scope, receive: Receive, send: Send) -> tuple[Scope, Receive, Send]:
    """Return the ASGI scope, receive and send of the GET request that opens a WebSocket. Status 101 opens the socket."""
    await receive()  # websocket.connect
    can_refuse = _REFUSAL in scope.get("extensions", {})

    async def answer(message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start and message["status"] == 101:
            accepted = {key: message.get(key) for key in ("headers", "subprotocol")}
            await send({"type": "websocket.accept", **accepted})
        elif can_refuse:
            await send({**message, "type": f"websocket.{message['type']}"})
        elif is_start:
            await send({"type": "websocket.close"})

    request: dict[str, Any] = {**scope, "type": "http", "method": "GET"}
    request[SOCKET] = Socket(receive, send, scope.get("subprotocols", ()))
    return request, _Body(receive), answer


class _Body:
    """Receiver of the handshake's request body, which is empty."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_read = False

    async def __call__(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (await self._receive())["type"] != "websocket.disconnect":
            pass
        return {"type": "http.disconnect"}


@dataclass(frozen=True, slots=True, eq=False)
class Sockets:
    """Factory of WebSocket protocols. `paths`: paths that open sockets. Handshakes on other paths are answered in HTTP."""

    clients: Clients
    paths: frozenset[bytes]

    def __call__(self, **arguments: Any) -> SocketProtocol:
        from server.http.socket_protocol import SocketProtocol  # with wsproto, for the first socket

        return SocketProtocol(self.clients, **arguments)


class OpenSockets:
    """Set of all open sockets."""

    def __init__(self) -> None:
        self._leave: dict[Callable[[], object], None] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._leave)

    @contextmanager
    def having(self, leave: Callable[[], object]) -> Iterator[None]:
        """Context during which a socket counts as open. `leave`: function that makes the socket finish and close."""
        self._leave[leave] = None
        self._none.clear()
        try:
            yield
        finally:
            del self._leave[leave]
            if not self._leave:
                self._none.set()

    def metrics(self) -> Iterator[Metric]:
        yield Metric("websockets_open", "Open WebSockets.", "gauge", {(): float(len(self))})

    def leave(self) -> None:
        """Request every socket to finish and close."""
        for leave in [*self._leave]:
            leave()

    async def closed(self, limit_s: float) -> bool:
        """Wait until all sockets are closed, up to `limit_s` seconds. Return whether all are closed."""
        try:
            await asyncio.wait_for(self._none.wait(), limit_s)
        except TimeoutError:
            return False
        return True
