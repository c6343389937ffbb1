"""SocketProtocol: uvicorn's WebSocket protocol over wsproto, with the limits of all connections.

Memory is bounded. Nothing is read while a message waits for the application. The parts of an unfinished message count as
`Clients.hold` counts unfinished bodies."""

from __future__ import annotations

from typing import Any

import wsproto
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

from server.http.clients import Clients, Timed
from server.http.errors import ApiError

_TRY_AGAIN_LATER = 1013  # RFC 6455's registry of codes


class SocketProtocol(WSProtocol):
    def __init__(self, clients: Clients, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._clients = clients
        self.deadline_queue: dict[Timed, float] | None = None
        self.is_admitted = False
        self.held_bytes = 0
        self._unsent_bytes = 0  # when the deadline was set

    @property
    def address(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def unfinished_bytes(self) -> int:
        return self.buffer.length

    def refuse(self, error: ApiError) -> None:
        """Close the connection, to free the memory of an unfinished message."""
        self._clients.refused[error.code or error.type] += 1
        self.buffer.clear()
        if not self.transport.is_closing() and self.conn.state is wsproto.connection.ConnectionState.OPEN:
            self.transport.write(self.conn.send(CloseConnection(code=_TRY_AGAIN_LATER, reason=str(error)[:120])))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.buffer.clear()
        self._clients.leave(self)

    def handle_message(self, event: TextMessage | BytesMessage) -> None:
        super().handle_message(event)
        self._clients.hold(self, self.buffer.length)

    def handle_ping(self, event: Ping) -> None:
        if self.writable.is_set():  # or else answers gather for a client that does not read
            super().handle_ping(event)

    def shutdown(self) -> None:
        """Do nothing: the application closes the socket when requested to finish. uvicorn waits for it, within its limit."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

    # --- slow readers -------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clients.deadlines.clear(self)

    def overdue(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _wait_for_reader(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._clients.deadlines.set(self, self._clients.config.timeout_write)
